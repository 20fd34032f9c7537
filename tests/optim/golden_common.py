"""Shared code of the golden mappings: learning rates, exclusions, and unread settings."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import optim
from lamb_tpu.optim.parameters import Rules


class Settings(dict):
    """Arguments of a recorded implementation; arguments left after all calls of `take` were not read."""

    def take(self, name: str, default: Any = None) -> Any:
        """Removes a setting and returns its value, or the implementation's default."""
        return self.pop(name, default)

    def renamed(
        self, names: Mapping[str, Sequence[str]], known: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Takes the settings with `names` and returns them as our `known` arguments.

        `names` maps our argument to its names in the implementations. If the settings have two of
        these names, the name that is listed later wins.
        """
        return {
            ours: self.take(theirs)
            for ours in known or names
            for theirs in names[ours]
            if theirs in self
        }

    def assume(
        self, name: str, *values: Any, why: str = "the mapping assumes another value"
    ) -> None:
        """Checks that a setting is absent, None or one of `values`.

        Raises NotImplementedError with the reason `why` for another value.
        """
        value = self.pop(name, None)
        # In Python True == 1, but the setting True must not count as 1.
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool)
            for known in values
        ):
            raise NotImplementedError(f"{name} is {value!r}: {why}")

    def same_numbers(self, name: str) -> None:
        """Ignores a flag that selects another way to compute the same numbers."""
        self.assume(name, True, False, why="it must be True or False")

    def legend(self, name: str) -> None:
        """Ignores a text that explains the recorded arrays."""
        if not isinstance(self.pop(name, ""), str):
            raise NotImplementedError(f"{name} must be a text about the recorded arrays")

    def check_empty(self, implementation: str) -> None:
        """Raises ValueError if a setting was not read."""
        if self:
            raise ValueError(
                f"{implementation} has settings that the mapping does not read: {dict(self)}"
            )


def rate(settings: Settings) -> optax.ScalarOrSchedule:
    """Returns the learning rate: 'const', or 'warm', which rises for 6 updates and falls for 14."""
    base = settings.take("lr")
    base = settings.take("learning_rate", base)
    kind = settings.take("lr_schedule")
    if kind == "const":
        return base
    if kind != "warm":
        raise ValueError(f"lr_schedule={kind!r} is unknown; use const or warm")
    # Use a table in float64, as in the recorded runs, so that each rate is rounded once.
    count = np.arange(20)
    table = base * np.where(count < 6, (count + 1) / 6, (20 - count) / 14)
    return lambda count: jnp.asarray(table)[count]


def rules(excluded: Sequence[str] | None, **metadata: Any) -> Rules:
    """Returns rules that give `metadata` to leaves whose path contains one of the patterns."""
    if not excluded:
        return "all"
    return [("|".join(excluded), metadata), ("", {})]


def leaf_rules(params: Any, **metadata: Callable[[str], Any]) -> Rules:
    """Returns one rule per leaf; each field of the metadata is a function of the leaf's path."""
    return [
        (f"^{re.escape(path)}$", {name: meta(path) for name, meta in metadata.items()})
        for path in paths(params)
    ]


def unless(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Returns a predicate for paths that no pattern matches."""
    return lambda path: not any(re.search(pattern, path) for pattern in patterns or ())


def patterns_without_decay(settings: Settings) -> list[str]:
    """Returns the patterns of the leaves in the parameter group without weight decay."""
    group = settings.take("excluded_group") or {"patterns": [], "weight_decay": 0.0}
    if set(group) != {"patterns", "weight_decay"} or group["weight_decay"]:
        raise ValueError(f"excluded_group={group!r} must have patterns and a weight_decay of 0")
    return group["patterns"]


def group_without_decay(settings: Settings) -> Rules:
    """Returns rules from the parameter group without weight decay."""
    return rules(patterns_without_decay(settings), decay=False)


def grouped(
    settings: Settings, params: Any, default_decay: float, tied: bool = False, adapt: bool = True
) -> Rules:
    """Returns rules from the group with separate options; the group's decay is 0 or the common decay.

    If `tied`, a group without decay only adapts if `always_adapt` is set.
    """
    group = dict(settings.take("excluded_group") or {})
    excluded = unless(group.pop("patterns", None))
    base = settings.get("weight_decay", default_decay)
    always = settings.take("always_adapt", False) if tied else True
    decays = {True: base, False: group.pop("weight_decay", base)}
    adapts = {True: always, False: group.pop("always_adapt", always)}
    if group or decays[False] not in (0, base):
        raise ValueError(
            f"excluded_group has {group or decays[False]!r}, which the mapping cannot read"
        )
    return leaf_rules(
        params,
        decay=lambda path: decays[excluded(path)] != 0,
        adapt=lambda path: adapt and bool(adapts[excluded(path)] or decays[excluded(path)] != 0),
    )


def timm_decay(settings: Settings) -> dict[str, Any]:
    """Returns timm's weight decay: in the gradient, decoupled, or decoupled relative to the peak rate."""
    strength, peak = settings.take("weight_decay", 0.0), settings["lr"]
    decoupled = settings.take("decoupled_decay", False)
    corrected = settings.take("corrected_weight_decay", False)
    if not decoupled:
        return {"weight_decay": strength}
    schedule = rate(Settings(settings))
    if not corrected or not callable(schedule):
        return {"weight_decay": strength, "decay": "decoupled"}
    return {"weight_decay": lambda count: strength / peak * schedule(count), "decay": "decoupled"}


def mask(value: bool | str | None) -> Callable[[str], bool]:
    """Parses a recorded mask: True or None for all leaves, False for none, or "not ['bias', ...]"."""
    if value is None or isinstance(value, bool):
        return lambda path: value is not False
    if not re.fullmatch(r"not \[('\w+'(, )?)+\]", value):
        raise ValueError(f"mask={value!r} must be a bool or have the form \"not ['bias']\"")
    return unless(re.findall(r"'(\w+)'", value))


def paths(params: Any) -> dict[str, jax.Array]:
    names = optim.parameters.leaf_paths(params)
    return dict(zip(names, jax.tree.leaves(params), strict=True))
