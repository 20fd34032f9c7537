"""The batch rule of a config: its fields, and the path of batches that it gives."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from lamb_tpu.batching.learning_rate import rate_factor
from lamb_tpu.batching.path import Path, follow
from lamb_tpu.batching.rules import RULES, Constant, NoiseScale, Rule
from lamb_tpu.batching.rules.base import Bounded
from lamb_tpu.batching.rules.noise_scale import NOISE_SCALE
from lamb_tpu.batching.similarity import SIMILARITY
from lamb_tpu.errors import UserError

SECTION = "batch_rule"
# Statistics of parts of a batch, which under jit are its microbatches.
OF_PARTS = {NOISE_SCALE, SIMILARITY}
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
      UserError: the rule, a field or a value is wrong, or the first batch does not fit it.
    """
    fields: Mapping[str, Any] = config.batch_rule.to_dict()
    name = fields.get("name", "constant")
    known = rule_fields(name)
    for key in fields:
        if key not in known:
            raise UserError(
                f"config.batch_rule.{key} is unknown; the rule {name!r} has: {', '.join(known)}"
            )
    if RULES[name] is Constant:
        return None, "identity"
    missing = [
        f"config.batch_rule.{key}"
        for key, (_, default) in known.items()
        if default is inspect.Parameter.empty and key not in fields
    ]
    if missing:
        them = ("are", "them") if len(missing) > 1 else ("is", "it")
        raise UserError(
            f"{' and '.join(missing)} {them[0]} missing; the rule {name!r} needs {them[1]}"
        )
    scaling = fields.get("scaling", "identity")
    if scaling not in _SCALINGS:
        raise UserError(f"config.batch_rule.scaling is {scaling!r}; known: {', '.join(_SCALINGS)}")
    given = {key: value for key, value in fields.items() if key not in ("name", "scaling")}
    pairs = _in_pairs(config, RULES[name])
    try:
        rule = RULES[name](quantum=(1 + pairs) * quantum(config), **given)
    except (ValueError, TypeError) as error:
        what = "two microbatches of" if pairs else "a microbatch,"
        raise UserError(
            f"config.batch_rule: {error}; a quantum is {what} "
            "config.batch_size / config.accumulation_steps"
        ) from error
    if isinstance(rule, Bounded) and not rule.smallest <= config.batch_size <= rule.upper:
        raise UserError(
            f"config.batch_size is {config.batch_size}, with which training begins, and "
            f"config.batch_rule keeps batches between {rule.smallest} and {rule.upper}; begin with "
            "one of these, or change config.batch_rule.lower or upper"
        )
    return rule, scaling


def _in_pairs(config: ConfigDict, rule: type[Rule]) -> bool:
    """Returns whether a batch must be pairs of microbatches, for parts of it are compared.

    Under jit the parts are microbatches, and one of them alone has nothing to be compared with.

    Raises:
      UserError: the first batch is not.
    """
    what = compares_parts(config, rule)
    if config.parallel.backend != "jit" or not what:
        return False
    if config.accumulation_steps % 2:
        raise UserError(
            f"config.accumulation_steps is {config.accumulation_steps}, and {what} compares "
            "microbatches under config.parallel.backend='jit'; it must be even, such as 2"
        )
    return True


def compares_parts(config: ConfigDict, rule: Rule | type[Rule] | None) -> str:
    """Returns what compares the parts of each batch, for messages; '' if nothing does."""
    if rule is not None and OF_PARTS & set(rule.needs):
        return f"the rule config.batch_rule.name={config.batch_rule.name!r}"
    return "config.optimizer.agvm" if has_agvm(config) else ""


def has_agvm(config: ConfigDict) -> bool:
    """Returns whether the optimizer is given the gradients of both halves of each batch."""
    return config.optimizer.get("agvm") is not None


def required_statistics(config: ConfigDict) -> dict[str, Any]:
    """Returns the settings of config.statistics that a config's batch rule and optimizer need.

    The variance is of the examples of one microbatch, and the averages have the rule's decay.
    """
    rule, _ = check_rule(config)
    needs = set() if rule is None else set(rule.needs)
    found: dict[str, Any] = {}
    if isinstance(rule, NoiseScale):
        found |= {"noise_scale": True, "decay": rule.decay}
    if SIMILARITY in needs or has_agvm(config):
        found["halves"] = True
    if rule is not None and needs - OF_PARTS:
        found |= {"per_example": quantum(config), "interval": rule.interval}
    return found


def quantum(config: ConfigDict) -> int:
    """Returns the examples of a microbatch over all devices, of which batches are whole numbers."""
    return config.batch_size // config.accumulation_steps


def resolve_path(
    config: ConfigDict, base_updates: int, most: int
) -> tuple[Rule | None, Path | None, str]:
    """Returns the rule of a config's batches, their path, and how the rate follows.

    The path of a rule that needs statistics has the first batch, and grows by decisions. For a
    constant batch rule and path are None.

    Args:
      config: a config.
      base_updates: length of the run in updates of config.batch_size.
      most: the largest number of updates.

    Raises:
      UserError: see `check_rule`; or there would be more updates.
    """
    rule, scaling = check_rule(config)
    if rule is None:
        return None, None, scaling
    total = base_updates * config.batch_size
    if rule.needs:
        return rule, Path(config.batch_size, total), scaling
    try:
        return rule, follow(rule, config.batch_size, total, most), scaling
    except ValueError as error:
        raise UserError(f"config.batch_rule: {error}") from error


def factors(sizes: np.ndarray, scaling: str, base: int) -> np.ndarray:
    """Returns the factor of the learning rate at each of some batch sizes, as float64.

    Args:
      sizes: batch sizes in examples.
      scaling: rule by which the rate follows the batch, see `batching.learning_rate.rate_factor`.
      base: the batch size that the schedule is for.
    """
    each, places = np.unique(sizes, return_inverse=True)
    return np.array([rate_factor(scaling, base, int(size)) for size in each])[places]
