"""The batch rule of a config: its checks, the statistics that it needs, and its path of batch sizes."""

from typing import Any

import numpy as np

from lamb_tpu import custom
from lamb_tpu.batching import variance
from lamb_tpu.batching.learning_rate import rate_factor
from lamb_tpu.batching.path import Path, follow
from lamb_tpu.batching.rules import RULES, Constant, Rule
from lamb_tpu.batching.rules.base import DECAY, NOISE_SCALE, Bounded
from lamb_tpu.batching.similarity import SIMILARITY
from lamb_tpu.errors import UserError, listed, naming, unknown
from lamb_tpu.spec import Spec
from lamb_tpu.spec_keys import plain

# Statistics that compare parts of a batch; under jit the parts are microbatches.
OF_PARTS = {NOISE_SCALE, SIMILARITY}
# All statistics that a rule may need.
STATISTICS = (
    NOISE_SCALE,
    SIMILARITY,
    variance.VARIANCE,
    variance.GRAD_SQ,
    variance.INNER_PRODUCT,
    variance.ORTHOGONAL,
)
_SCALINGS = ("identity", "linear", "sqrt")


def check_rule(spec: Spec) -> tuple[Rule | None, str]:
    """Returns a config's batch rule (None for a constant batch) and its learning-rate scaling."""
    section = spec.batch_rule
    name, fields = RULES.name_in(section), plain(section.fields)
    made = RULES.find(name)
    RULES.check(name, fields)
    if made is Constant:
        return None, "identity"
    if not isinstance(made, type) or not issubclass(made, Rule):
        remedy = "use a class that inherits from lamb_tpu.batching.rules.Rule"
        raise UserError("config.batch_rule.name", name, "is not a batch rule", remedy)
    # Memory checks and plans need the largest batch.
    if made.needs and not issubclass(made, Bounded):
        problem = f"needs statistics ({', '.join(made.needs)}) but has no largest batch"
        remedy = "derive its class from lamb_tpu.batching.rules.Bounded"
        raise UserError("config.batch_rule.name", name, problem, remedy)
    if strange := sorted(set(made.needs) - set(STATISTICS)):
        problem = f"needs the unknown statistic {strange[0]!r}"
        raise UserError("config.batch_rule.name", name, problem, f"use {listed(STATISTICS)}")
    scaling = fields.get("scaling", "identity")
    if scaling not in _SCALINGS:
        raise unknown("config.batch_rule.scaling", scaling, _SCALINGS)
    pairs = _in_pairs(spec, made)
    given = {key: value for key, value in fields.items() if key != "scaling"}
    with custom.calling(f"config.batch_rule.name={name!r}", failures=True):
        try:
            with naming("config.batch_rule", given):
                rule = made(granularity=(1 + pairs) * granularity(spec), **given)
        except UserError as error:
            if "granularity" not in error.problem:
                raise
            what = "two microbatches, 2 *" if pairs else "one microbatch,"
            source = f"the granularity is {what} config.batch_size / config.accumulation_steps"
            remedy = f"{error.remedy} ({source})"
            raise UserError(error.key, error.value, error.problem, remedy) from error
    return rule, scaling


def _in_pairs(spec: Spec, rule: type[Rule]) -> bool:
    """Returns whether the run compares pairs of microbatches; if so, rejects odd accumulation_steps."""
    what = compares_parts(spec, rule)
    if spec.parallel.backend != "jit" or not what:
        return False
    if spec.accumulation_steps % 2:
        problem = f"is odd, but {what} compares pairs of microbatches"
        raise UserError(
            "config.accumulation_steps",
            spec.accumulation_steps,
            problem,
            "use an even number, such as 2, or config.parallel.backend='shard_map'",
        )
    return True


def compares_parts(spec: Spec, rule: Rule | type[Rule] | None) -> str:
    """Returns the key of the rule or optimizer that compares parts of each batch; '' if none does."""
    if rule is not None and OF_PARTS & set(rule.needs):
        return f"config.batch_rule.name={spec.batch_rule.name!r}"
    return "config.optimizer.agvm" if has_agvm(spec) else ""


def has_agvm(spec: Spec) -> bool:
    """Returns whether the optimizer gets the gradients of both halves of each batch (AGVM)."""
    return spec.optimizer.get("agvm") is not None


def required_statistics(spec: Spec) -> dict[str, Any]:
    """Returns the settings of config.statistics that a config's batch rule and optimizer need."""
    rule, _ = check_rule(spec)
    needs = set() if rule is None else set(rule.needs)
    settings: dict[str, Any] = {}
    if NOISE_SCALE in needs:
        settings |= {"noise_scale": True, "decay": getattr(rule, "decay", DECAY)}
    if SIMILARITY in needs or has_agvm(spec):
        settings["halves"] = True
    if rule is not None and needs - OF_PARTS:
        settings |= {"per_example": granularity(spec), "interval": rule.interval}
    return settings


def granularity(spec: Spec) -> int:
    """Returns the examples in a microbatch over all devices; this number divides each batch size."""
    return spec.batch_size // spec.accumulation_steps


def resolve_path(spec: Spec, base_updates: int, most: int) -> tuple[Rule | None, Path | None, str]:
    """Returns the batch rule, the path of batch sizes, and the scaling of the learning rate.

    If the rule needs statistics, the path has only the first batch size, and the rule's decisions
    extend the path during the run. For a constant batch, rule and path are None.

    Args:
      spec: a config.
      base_updates: length of the run in updates of config.batch_size examples.
      most: the largest allowed number of updates.
    """
    rule, scaling = check_rule(spec)
    if rule is None:
        return None, None, scaling
    total = base_updates * spec.batch_size
    if rule.needs:
        return rule, Path.from_segments([(0, spec.batch_size)], total), scaling
    with naming("config.batch_rule"):
        return rule, follow(rule, spec.batch_size, total, most), scaling


def factors(sizes: np.ndarray, scaling: str, base: int) -> np.ndarray:
    """Returns the learning-rate factor of each batch size, as float64; the factor of `base` is 1."""
    each, inverse = np.unique(sizes, return_inverse=True)
    return np.array([rate_factor(scaling, base, int(size)) for size in each])[inverse]
