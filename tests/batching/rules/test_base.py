"""Tests every rule in `RULES` and the base classes: bounds, granularity, rounding and statistics."""

import math

import pytest

from lamb_tpu.batching.rules import RULES, NoiseScale, NormTest
from lamb_tpu.batching.rules.base import required

# For each rule, valid arguments, and statistics that the rule can read.
ARGUMENTS = {
    "constant": {},
    "ramp": {"points": ((0, 64),)},
    "simigrad": {"target": 0.9},
    "norm_test": {"eta": 0.5},
    "inner_product_test": {"theta": 0.5},
    "augmented": {"theta": 0.5, "nu": 2.0},
    "noise_scale": {},
}
STATISTICS = {
    "similarity": 0.3,
    "variance": 90.0,
    "inner_product_variance": 80.0,
    "orthogonal_variance": 70.0,
    "grad_sq": 1.5,
    "noise_scale": 200.0,
}
UNBOUNDED = ("constant", "ramp")


def _make(name, **arguments):
    bounds = {} if name in UNBOUNDED else {"upper": 256}
    return RULES[name](**{"granularity": 8} | bounds | ARGUMENTS[name] | arguments)


def test_the_table_is_complete() -> None:
    assert RULES.keys() == ARGUMENTS.keys()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("batch", [8, 64, 256])
def test_every_rule_gives_multiples_within_bounds(name, batch) -> None:
    actual = _make(name).next_batch(batch, STATISTICS, examples=1000)
    assert type(actual) is int and actual % 8 == 0 and 8 <= actual <= 256
    assert actual == _make(name).next_batch(batch, STATISTICS, examples=1000)


@pytest.mark.parametrize("name", [name for name in RULES if name not in UNBOUNDED])
def test_numbers_that_are_not_finite_leave_the_batch(name) -> None:
    nothing = dict.fromkeys(STATISTICS, math.nan)
    assert _make(name).next_batch(64, nothing, examples=0) == 64
    with pytest.raises(ValueError, match="the rule needs the statistic .*, but it has only: loss"):
        _make(name).next_batch(64, {"loss": 1.0}, examples=0)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_names_its_statistics(name) -> None:
    rule = _make(name)
    needed = {key: STATISTICS[key] for key in rule.needs}
    assert bool(needed) == (name not in UNBOUNDED)
    assert rule.next_batch(64, needed, 0) == rule.next_batch(64, STATISTICS, 0)
    for key in needed:
        with pytest.raises(ValueError, match=f"the rule needs the statistic '{key}'"):
            rule.next_batch(64, {other: needed[other] for other in needed if other != key}, 0)


@pytest.mark.parametrize("name", RULES)
def test_intervals(name) -> None:
    rule = _make(name, interval=3)
    assert [rule.due(updates) for updates in range(5)] == [True, False, False, True, False]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"granularity": 0}, "granularity=0 must be a whole number of at least 1"),
        ({"granularity": 2.5}, "granularity=2.5 must be a whole number of at least 1"),
        ({"interval": 0}, "interval=0 must be a whole number of at least 1"),
        ({"upper": 100}, "upper=100 must be a multiple of the batch granularity 8; use 96 or 104"),
        ({"lower": 3}, "lower=3 must be a multiple of the batch granularity 8; use 8$"),
        ({"lower": 64, "upper": 32}, "lower=64 must be at most upper=32"),
        ({"upper": 0}, "upper=0 must be a whole number of at least 1"),
    ],
)
@pytest.mark.parametrize("name", [name for name in RULES if name not in UNBOUNDED])
def test_rejected_bounds_and_multiples(name, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        _make(name, **arguments)


def test_the_wanted_batch_is_rounded_up_and_bounded() -> None:
    rule = NoiseScale(granularity=32, lower=64, upper=256)
    wanted = {0.5: 64, 64: 64, 64.5: 96, 96: 96, 1e9: 256, math.inf: 256}
    assert {w: rule.next_batch(128, {"noise_scale": w}, 0) for w in wanted} == wanted


def test_a_batch_at_its_upper_bound_stays_there() -> None:
    rule = NormTest(granularity=32, upper=64, eta=0.01)
    assert rule.next_batch(64, {"variance": 1e9, "grad_sq": 1e-9}, 0) == 64


def test_a_constant_batch_reads_nothing() -> None:
    rule = RULES["constant"](granularity=4)
    assert [rule.next_batch(batch, {}, batch * 9) for batch in (4, 12)] == [4, 12]


def test_divisions_by_zero() -> None:
    assert required(1.0, 0.0) == math.inf and required(0.0, 0.0) == 0.0
    assert required(math.nan, 1.0) == 0.0 and required(6.0, 2.0) == 3.0
