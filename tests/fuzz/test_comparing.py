"""Differences in units of the spread of rounding errors."""

import types

import numpy as np

from tests.fuzz.comparing import LIMIT, compare
from tests.fuzz.oracle import Trajectory


def ratios(value: np.ndarray, expected: float, spread: float) -> dict[str, float]:
    def trajectory(shift: float) -> Trajectory:
        state = {"x": np.full(4, expected + shift), "count": np.int32(3)}
        return Trajectory({2: state}, {2: {"loss": (expected, 1.0)}}, {2: {"loss": expected}})

    exact_ones = {k: trajectory(k * spread) for k in (0.0, 1.0, -1.0, 16.0, -16.0)}
    leg = types.SimpleNamespace(
        states={2: {"x": value, "count": np.int32(3)}},
        records=[{"kind": "train", "step": 2, "updates": 1, "loss": float(value[0])}],
    )
    return {each.what: each.ratio for each in compare("first", leg, exact_ones)}


def test_differences_count_in_spreads() -> None:
    found = ratios(np.full(4, 1 + 3e-5, np.float32), 1.0, 1e-5)
    assert 2.9 < found["first update 2 x"] < 3.1 and found["first update 2 count"] == 0
    assert max(ratios(np.full(4, 1.0, np.float32), 1.0, 1e-9).values()) < 1
    assert found["first train 2 loss"] > LIMIT  # its spread is 0


def test_values_that_are_not_finite_fail() -> None:
    found = ratios(np.full(4, np.nan, np.float32), 1.0, 1e-5)
    assert found["first update 2 x"] == np.inf


def test_missing_leaves_fail() -> None:
    leg = types.SimpleNamespace(states={2: {}}, records=[])
    one = Trajectory({2: {"x": np.ones(2)}}, {}, {})
    [found] = compare("first", leg, {0.0: one, 1.0: one, -1.0: one, 16.0: one, -16.0: one})
    assert found.ratio == np.inf and "leaves x" in found.what
