"""Compares a leg with the oracle, leaf by leaf, in units of the program's own rounding errors."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tests.fuzz import exact, oracle
from tests.fuzz.oracle import Trajectory
from tests.fuzz.running import Leg

# Largest allowed ratio of a difference to the spread of the rounding errors. See README.md in this
# folder for the ratios of correct runs.
LIMIT = 64.0
# In bfloat16 some outputs are equal or nearly so; the largest share of examples whose class flips.
FLIPS = 0.15


class Difference(NamedTuple):
    """A result of a leg that differs from the oracle's.

    Attributes:
      what: the leg, the update, and the leaf or metric.
      ratio: the difference in units of the spread; infinite if no rounding error explains it.
      value, expected: norms of the two.
    """

    what: str
    ratio: float
    value: float
    expected: float

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.6g}, not {self.expected:.6g} (ratio {self.ratio:.3g})"


def compare(name: str, leg: Leg, exact_ones: Mapping[float, Trajectory]) -> list[Difference]:
    """Returns the ratio of each leaf, metric and evaluation of a leg."""
    found: list[Difference] = []
    expected, is_coarse = exact_ones[0.0], oracle.LARGE not in exact_ones
    for update, state in sorted(leg.states.items()):
        others = [each.states[update] for k, each in exact_ones.items() if k]
        found += _trees(
            f"{name} update {update} ", state, expected.states[update], others, is_coarse
        )
    for record in leg.records:
        kind, update = record["kind"], record["step"]
        if kind not in ("train", "eval"):
            continue
        count = record.get("updates", 1)
        wanted = expected.metrics(kind, update, count)
        others = [each.metrics(kind, update, count) for k, each in exact_ones.items() if k]
        shared = {key: np.float32(value) for key, value in record.items() if key in wanted}
        # The legs may differ in whether updates can be skipped.
        if missing := wanted.keys() - shared.keys() - {"skipped"}:
            what = f"{name} {kind} {update} lacks {', '.join(sorted(missing))}"
            found.append(Difference(what, np.inf, 0, 0))
        found += _trees(
            f"{name} {kind} {update} ",
            shared,
            {key: wanted[key] for key in shared},
            [{key: each[key] for key in shared} for each in others],
            is_coarse,
        )
    return found


def _trees(
    name: str, actual: Any, expected: Any, others: list[Any], is_coarse: bool
) -> list[Difference]:
    if missing := actual.keys() ^ expected.keys():
        return [Difference(f"{name}leaves {', '.join(sorted(missing)[:3])}", np.inf, 0, 0)]
    return [
        _leaf(f"{name}{path}", value, expected[path], [other[path] for other in others], is_coarse)
        for path, value in actual.items()
    ]


def _leaf(name: str, actual: Any, expected: Any, others: list[Any], is_coarse: bool) -> Difference:
    actual = np.asarray(actual)
    if not exact.is_float(actual.dtype):
        same = actual.shape == np.shape(expected) and np.array_equal(actual, expected)
        norms = (float(np.linalg.norm(each)) for each in (actual, np.asarray(expected)))
        return Difference(name, 0.0 if same else np.inf, *norms)
    eps = float(jnp.finfo(actual.dtype).eps)
    actual = actual.astype(np.float64)
    if actual.shape != np.shape(expected):
        return Difference(name, np.inf, 0.0, 0.0)
    expected = np.asarray(expected, np.float64)
    value, wanted = float(np.linalg.norm(actual)), float(np.linalg.norm(expected))
    spreads = [float(np.linalg.norm(np.asarray(other) - expected)) for other in others]
    # The last two have large errors with other signs, which may pass a discontinuity.
    factor = oracle.LARGE_BFLOAT16 if is_coarse else oracle.LARGE
    small, large = max(spreads[:2]), max(spreads[2:]) / factor
    spread = max(small, large, eps * wanted / 2, oracle_floor(eps))
    if is_coarse and name.endswith("accuracy"):
        spread += FLIPS / LIMIT
    gap = float(np.linalg.norm(actual - expected))
    ratio = gap / spread if np.isfinite(gap) else np.inf
    return Difference(name, ratio, value, wanted)


def oracle_floor(eps: float) -> float:
    """Returns the difference that always passes, for values that underflow in float32."""
    return float(np.finfo(np.float32).tiny) / eps * oracle.SMALL
