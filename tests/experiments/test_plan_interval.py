"""Intervals of planned times, and their coverage of left-out runs."""

import dataclasses
import doctest
import math

import numpy as np
import pytest
from scipy import stats

from experiments.plan import fit, interval
from experiments.plan.fit import Sample
from lamb_tpu.cost.network import PROFILE
from tests.experiments.test_plan_fit import samples


def drawn(seed: int, programs: float, generations: float) -> list[Sample]:
    """Returns runs of 8 programs on 4 generations; the arguments set the standard deviation of effects."""
    random = np.random.default_rng(seed)
    factors = np.exp(programs * random.standard_normal(8))
    speeds = np.exp(generations * random.standard_normal(4))
    return [
        Sample(
            f"program {one}",
            f"v{other + 3}",
            100.0,
            (0.0, 0.0, 0.0),
            100.0 * factors[one] * speeds[other] * math.exp(0.02 * random.standard_normal()),
        )
        for one in range(8)
        for other in range(4)
    ]


def test_the_width_is_that_of_the_formula() -> None:
    runs = samples(0.05)
    actual = fit.fit(runs)

    def squares(factors: dict[str, float], assumed: float) -> float:
        logs = np.log(list(factors.values()))
        return (math.log(assumed) ** 2 + ((logs - logs.mean()) ** 2).sum()) / len(logs)

    errors = np.log([actual.seconds(run) / run.measured for run in runs])
    total = squares(dict(actual.factors), 2.0) * 4 / 3 + (errors**2).sum() / 11
    for is_seen in (True, False):
        if not is_seen:
            total += squares(dict(actual.generations), 1.25) * 3 / 2
        expected = stats.t.ppf(0.95, 3) * total**0.5
        assert math.log(interval.width(actual, runs, is_seen)) == pytest.approx(expected)


def test_a_generation_without_runs_is_an_average_one() -> None:
    runs = samples()
    actual = fit.fit(runs)
    seen, unseen = (interval.bounds(actual, runs, version) for version in ("v4", "v6e"))
    assert seen.middle.compute_factor == pytest.approx(1.1 * 0.7, rel=0.01)
    assert unseen.middle.compute_factor == pytest.approx(1.1 * 0.7**0.5, rel=0.01)
    widths = [each.high.compute_factor / each.low.compute_factor for each in (seen, unseen)]
    assert widths[1] > 1.2 * widths[0]


def test_every_time_is_scaled() -> None:
    runs = samples()
    actual = fit.fit(runs)
    each = interval.bounds(actual, runs, "v4")
    by = interval.width(actual, runs, True)
    for constants, factor in ((each.low, 1 / by), (each.high, by)):
        assert constants.compute_factor == pytest.approx(each.middle.compute_factor * factor)
        # The upper end is no faster than the profile, although these runs' hops are faster.
        slow = factor > 1
        hop = max(each.middle.hop_seconds, slow * PROFILE.hop_seconds)
        assert constants.hop_seconds == pytest.approx(hop * factor)
        efficiency = min(1.0, each.middle.efficiency / factor)
        assert constants.efficiency == pytest.approx(efficiency)
    run = runs[1]
    assert interval.seconds(each.middle, run) == pytest.approx(
        actual.factor * actual.generations["v4"] * run.compute + actual.network_seconds(run)
    )


def test_nothing_of_what_is_left_out_is_used() -> None:
    """If a program's or generation's times change, all intervals change except those of its own runs."""
    runs = samples(0.02)
    slow = [
        dataclasses.replace(run, measured=200 * run.measured) if run.source == "c" else run
        for run in runs
    ]
    for before, after, run in zip(
        interval.without_programs(runs), interval.without_programs(slow), runs, strict=True
    ):
        assert (before == after) == (run.source == "c")
    fast = [
        dataclasses.replace(run, measured=run.measured / 3) if run.generation == "v4" else run
        for run in runs
    ]
    for before, after, run in zip(
        interval.without_generations(runs), interval.without_generations(fast), runs, strict=True
    ):
        assert (before == after) == (run.generation == "v4")
    validation = interval.validate(slow)
    assert validation.programs == (10, 15)  # the runs of c are outside
    assert interval.validate(runs).programs == (15, 15)


def test_coverage_of_runs_with_known_spreads() -> None:
    hits = number = 0
    for seed in range(6):
        runs = drawn(seed, 0.5, 0.2)
        for without in (interval.without_programs(runs), interval.without_generations(runs)):
            hits += interval.covered(without, runs)
            number += len(runs)
    assert 0.85 <= hits / number < 1.0


def test_one_generation_has_nobody_to_leave_out() -> None:
    runs = [run for run in samples() if run.generation == "v3"]
    assert interval.validate(runs).generations == {}


def test_docstrings() -> None:
    assert doctest.testmod(interval) == (0, 2)
