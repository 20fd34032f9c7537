"""The batch rule of a config: its fields, and the path of batches that it gives."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from lamb_tpu.batching.learning_rate import rate_factor
from lamb_tpu.batching.path import Path, follow
from lamb_tpu.batching.rules import RULES, Constant, Ramp, Rule
from lamb_tpu.errors import UserError

SECTION = "batch_rule"
# Rules whose batch is a function of the examples seen. The others need statistics of gradients.
_KNOWN_BEFORE = (Constant, Ramp)
_SCALINGS = ("identity", "linear", "sqrt")


def rule_fields(name: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the type and default of each field of config.batch_rule for a rule.

    A field without a default has `inspect.Parameter.empty`.

    Raises:
      UserError: the rule is unknown.
    """
    if name not in RULES:
        raise UserError(f"config.batch_rule.name is {name!r}; known: {', '.join(RULES)}")
    found: dict[str, tuple[Any, Any]] = {"name": (str, "constant")}
    if RULES[name] is Constant:
        return found
    for field in dataclasses.fields(RULES[name]):
        # config.batch_size and config.accumulation_steps are the quantum.
        if field.name != "quantum":
            missing = field.default is dataclasses.MISSING
            found[field.name] = field.type, inspect.Parameter.empty if missing else field.default
    return found | {"scaling": (str, "identity")}


def check_rule(config: ConfigDict) -> tuple[Rule | None, str]:
    """Returns the rule of a config, and how the rate follows; None for a constant batch.

    Raises:
      UserError: the rule, a field or a value is wrong, or the rule needs statistics.
    """
    fields: Mapping[str, Any] = config.batch_rule.to_dict()
    name = fields.get("name", "constant")
    known = rule_fields(name)
    for key in fields:
        if key not in known:
            raise UserError(
                f"config.batch_rule.{key} is unknown; the rule {name!r} has: {', '.join(known)}"
            )
    if not issubclass(RULES[name], _KNOWN_BEFORE):
        names = ", ".join(key for key, rule in RULES.items() if issubclass(rule, _KNOWN_BEFORE))
        raise UserError(
            f"config.batch_rule.name is {name!r}, which decides by statistics of gradients, and "
            f"the trainer measures none yet; it has: {names}"
        )
    if RULES[name] is Constant:
        return None, "identity"
    for key, (_, default) in known.items():
        if default is inspect.Parameter.empty and key not in fields:
            raise UserError(f"config.batch_rule.{key} is missing; the rule {name!r} needs it")
    scaling = fields.get("scaling", "identity")
    if scaling not in _SCALINGS:
        raise UserError(
            f"config.batch_rule.scaling is {scaling!r}; known: {', '.join(_SCALINGS)}"
        )
    given = {key: value for key, value in fields.items() if key not in ("name", "scaling")}
    try:
        return RULES[name](quantum=quantum(config), **given), scaling
    except (ValueError, TypeError) as error:
        raise UserError(
            f"config.batch_rule: {error}; a quantum is a microbatch, "
            "config.batch_size / config.accumulation_steps"
        ) from error


def quantum(config: ConfigDict) -> int:
    """Returns the examples of a microbatch over all devices, of which batches are whole numbers."""
    return config.batch_size // config.accumulation_steps


def resolve_path(config: ConfigDict, base_updates: int, most: int) -> tuple[Path | None, str]:
    """Returns the path of a config's batches, and how the rate follows; None if they are constant.

    Args:
      config: a config.
      base_updates: length of the run in updates of config.batch_size.
      most: the largest number of updates.

    Raises:
      UserError: see `check_rule`; or there would be more updates.
    """
    rule, scaling = check_rule(config)
    if rule is None:
        return None, scaling
    try:
        return follow(rule, config.batch_size, base_updates * config.batch_size, most), scaling
    except ValueError as error:
        raise UserError(f"config.batch_rule: {error}") from error


def factors(path: Path, scaling: str, base: int) -> np.ndarray:
    """Returns the factor of the learning rate of every update, float64 (updates,).

    Args:
      path: of the run.
      scaling: rule by which the rate follows the batch, see `batching.learning_rate.rate_factor`.
      base: the batch size that the schedule is for.
    """
    sizes, places = np.unique(path.batches(), return_inverse=True)
    return np.array([rate_factor(scaling, base, int(size)) for size in sizes])[places]
