"""The fit recovers known network constants from synthetic runs."""

import dataclasses

import numpy as np
import pytest

from experiments.plan import fit
from experiments.plan.fit import Sample
from lamb_tpu.cost.network import PROFILE

NETWORK = (1.25, 0.8, 12.0)
FACTORS = {"a": 0.9, "b": 1.7, "c": 1.1}
GENERATIONS = {"v3": 1.0, "v4": 0.7}


def samples(noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(0)
    actual = []
    for source, factor in FACTORS.items():
        for index in range(5):
            links, hops, count = random.uniform((5, 0.1, 0.02), (60, 20, 2))
            generation = "v4" if index % 2 else "v3"
            sample = Sample(source, generation, 100.0, (links, hops, count), 1.0)
            time = factor * GENERATIONS[generation] * 100.0 + np.dot(sample.basis, NETWORK)
            time *= np.exp(noise * random.standard_normal())
            actual.append(dataclasses.replace(sample, measured=time))
    return actual


def test_known_constants_are_fitted() -> None:
    actual = fit.fit(samples())
    np.testing.assert_allclose(actual.network, NETWORK, rtol=0.02)  # the prior shifts them slightly
    assert actual.factors == pytest.approx(FACTORS, rel=0.01)
    assert actual.generations == pytest.approx(GENERATIONS, rel=0.01)


def test_a_run_left_out_is_predicted_from_the_others() -> None:
    runs = [*samples(), Sample("alone", "v3", 100.0, (10.0, 1.0, 1.0), 150.0)]
    ratios = fit.leave_out_runs(runs)
    assert ratios[-1] is None
    np.testing.assert_allclose(np.asarray(ratios[:-1], float), 1.0, rtol=1e-3)
    # With an error in each run, a run must not influence its own prediction.
    noisy = samples(0.1)
    errors = np.log(np.asarray(fit.leave_out_runs(noisy), float))
    within = fit.fit(noisy)
    fitted = np.log([within.seconds(each) / each.measured for each in noisy])
    assert np.abs(errors).mean() > 1.1 * np.abs(fitted).mean()


def test_a_source_left_out_has_the_median_factor_of_the_others() -> None:
    runs = samples()
    medians = {"a": 1.4, "b": 1.0, "c": 1.3}  # median factor of the other two sources
    expected = [
        (medians[run.source] * GENERATIONS[run.generation] * 100 + np.dot(run.basis, NETWORK))
        / run.measured
        for run in runs
    ]
    np.testing.assert_allclose(fit.leave_out_sources(runs), expected, rtol=0.02)


def test_without_runs_that_show_them_the_constants_of_the_network_stay() -> None:
    silent = [dataclasses.replace(each, basis=(0.0, 0.0, 0.0)) for each in samples()]
    expected = 1 / PROFILE.efficiency, PROFILE.hop_seconds * 1e6, PROFILE.collective_seconds * 1e6
    assert fit.fit(silent).network == pytest.approx(expected)


def test_a_generation_left_out_is_an_average_one() -> None:
    actual = fit.fit(samples())
    new = Sample("a", "v5e", 100.0, (0.0, 0.0, 0.0), 1.0)
    assert actual.seconds(new) == pytest.approx(0.9 * 0.7**0.5 * 100.0, rel=0.01)
    # Without the first generation, the other generation's factor merges with the sources'.
    others = fit.fit([run for run in samples() if run.generation == "v4"])
    assert others.generations == {"v4": 1.0}
    assert others.factors == pytest.approx(
        {name: 0.7 * each for name, each in FACTORS.items()}, rel=0.02
    )
