"""Common parts of the families' mappings: learning rates, exclusions, and unread settings."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import optim
from lamb_tpu.optim.parameters import Rules


class Settings(dict):
    """The recorded implementation's arguments: taking one removes it, so what is left is unread."""

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a setting, or the default that the implementation has."""
        return self.pop(name, default)

    def assume(self, name: str, *values: Any, why: str = "the mapping assumes otherwise") -> None:
        """Takes a setting that may be absent, None or one of `values`.

        Raises NotImplementedError with `why` for another value, rather than ignoring it.
        """
        value = self.pop(name, None)
        # True is not the number 1 here.
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool)
            for known in values
        ):
            raise NotImplementedError(f"{name} is {value!r}: {why}")

    def same_numbers(self, name: str) -> None:
        """Takes a flag for another way to compute the same numbers."""
        self.assume(name, True, False, why="it must be True or False")

    def legend(self, name: str) -> None:
        """Takes a text that says how the recorded arrays are to be read."""
        if not isinstance(self.pop(name, ""), str):
            raise NotImplementedError(f"{name} must be a text about the recorded arrays")

    def check_empty(self, implementation: str) -> None:
        """Raises ValueError if a setting was not read."""
        if self:
            raise ValueError(f"{implementation}: settings without a meaning here: {dict(self)}")


def rate(settings: Settings) -> optax.ScalarOrSchedule:
    """The learning rate: 'const', or 'warm', which rises for 6 updates and falls for 14."""
    base = settings.take("lr")
    base = settings.take("learning_rate", base)
    kind = settings.take("lr_schedule")
    if kind == "const":
        return base
    if kind != "warm":
        raise ValueError(f"lr_schedule {kind!r} is unknown")
    # From a table in float64, as the recorded runs had it: each rate is rounded once.
    count = np.arange(20)
    table = base * np.where(count < 6, (count + 1) / 6, (20 - count) / 14)
    return lambda count: jnp.asarray(table)[count]


def rules(excluded: Sequence[str] | None, **facts: Any) -> Rules:
    """Rules that give `facts` to the leaves whose path holds one of the patterns."""
    if not excluded:
        return "all"
    return [("|".join(excluded), facts), ("", {})]


def leaf_rules(params: Any, **facts: Callable[[str], Any]) -> Rules:
    """A rule for each leaf: every fact is given as a function of the leaf's path."""
    return [
        (f"^{re.escape(path)}$", {name: fact(path) for name, fact in facts.items()})
        for path in paths(params)
    ]


def unless(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Returns whether no pattern is found in a path."""
    return lambda path: not any(re.search(pattern, path) for pattern in patterns or ())


def group_without_decay(settings: Settings) -> Rules:
    """Rules from the parameter group that has no weight decay."""
    group = settings.take("excluded_group") or {"patterns": [], "weight_decay": 0.0}
    if set(group) != {"patterns", "weight_decay"} or group["weight_decay"]:
        raise ValueError(f"excluded_group {group!r} is unknown")
    return rules(group["patterns"], decay=False)


def grouped(
    settings: Settings, params: Any, default_decay: float, tied: bool = False, adapt: bool = True
) -> Rules:
    """Rules from the group that has options of its own, its decay 0 or that of the others.

    `tied` means that a group without decay adapts only where `always_adapt` is set.
    """
    group = dict(settings.take("excluded_group") or {})
    excluded = unless(group.pop("patterns", None))
    base = settings.get("weight_decay", default_decay)
    always = settings.take("always_adapt", False) if tied else True
    decays = {True: base, False: group.pop("weight_decay", base)}
    adapts = {True: always, False: group.pop("always_adapt", always)}
    if group or decays[False] not in (0, base):
        raise ValueError(f"excluded_group with {group or decays[False]!r} is unknown")
    return leaf_rules(
        params,
        decay=lambda path: decays[excluded(path)] != 0,
        adapt=lambda path: adapt and bool(adapts[excluded(path)] or decays[excluded(path)] != 0),
    )


def timm_decay(settings: Settings) -> dict[str, Any]:
    """timm's weight decay: in the gradient, decoupled, or that and relative to the first rate."""
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
    """A mask as the record has it: True or None for every leaf, False, "not ['bias', ...]"."""
    if value is None or isinstance(value, bool):
        return lambda path: value is not False
    if not re.fullmatch(r"not \[('\w+'(, )?)+\]", value):
        raise ValueError(f"the mask {value!r} is unknown")
    return unless(re.findall(r"'(\w+)'", value))


def paths(params: Any) -> dict[str, jax.Array]:
    """Every leaf by its path."""
    names = optim.parameters.leaf_paths(params)
    return dict(zip(names, jax.tree.leaves(params), strict=True))
