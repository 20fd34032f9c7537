"""Constants of the network, fitted to runs whose constants are known."""

import dataclasses

import numpy as np
import pytest

from experiments.plan import fit
from experiments.plan.fit import Sample

NETWORK = (1.25, 0.8, 12.0)
FACTORS = {"a": 0.9, "b": 1.7, "c": 1.1}
GENERATIONS = {"v3": 1.0, "v4": 0.7}


def samples(noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(0)
    found = []
    for source, factor in FACTORS.items():
        for place in range(5):
            links, hops, count = random.uniform((5, 0.1, 0.02), (60, 20, 2))
            generation = "v4" if place % 2 else "v3"
            sample = Sample(source, generation, 100.0, (links, hops, count), 1.0)
            time = factor * sample.seconds(NETWORK, GENERATIONS[generation])
            time *= np.exp(noise * random.standard_normal())
            found.append(dataclasses.replace(sample, measured=time))
    return found


def test_known_constants_are_found() -> None:
    found = fit.fit(samples())
    np.testing.assert_allclose(found.network, NETWORK, rtol=1e-4)
    assert found.factors == pytest.approx(FACTORS, rel=1e-5)
    assert found.generations == pytest.approx(GENERATIONS, rel=1e-5)


def test_a_run_left_out_is_predicted_from_the_others() -> None:
    runs = [*samples(), Sample("alone", "v3", 100.0, (10.0, 1.0, 1.0), 150.0)]
    ratios = fit.leave_out_runs(runs)
    assert ratios[-1] is None
    np.testing.assert_allclose(np.asarray(ratios[:-1], float), 1.0, rtol=1e-3)
    # With an error in each run, the run itself must not be in its own prediction.
    noisy = samples(0.1)
    errors = np.log(np.asarray(fit.leave_out_runs(noisy), float))
    within = fit.fit(noisy)
    fitted = np.log([within.seconds(each) / each.measured for each in noisy])
    assert np.abs(errors).mean() > 1.1 * np.abs(fitted).mean()


def test_a_source_left_out_has_the_median_factor_of_the_others() -> None:
    ratios = np.reshape(fit.leave_out_sources(samples()), (3, 5))
    # The medians of the other two sources' factors.
    expected = [1.4 / 0.9, 1.0 / 1.7, 1.3 / 1.1]
    np.testing.assert_allclose(ratios, np.repeat(np.reshape(expected, (3, 1)), 5, 1), rtol=1e-3)


def test_calibration_scales_every_time() -> None:
    found = fit.fit(samples())
    ratios = [1 / 0.8, 1.0, 1 / 2.0] * 20
    constants = fit.calibration(found, ratios, "three sources")
    low, middle, high = constants.each
    assert middle.compute_factor == pytest.approx(1.1, rel=1e-4)
    assert low.compute_factor == pytest.approx(0.8 * 1.1, rel=1e-4)
    assert high.compute_factor == pytest.approx(2.0 * 1.1, rel=1e-4)
    for each in constants.each:
        assert 1 / each.efficiency == pytest.approx(1.25 * each.compute_factor, rel=1e-4)
        assert each.hop_seconds == pytest.approx(0.8e-6 * each.compute_factor, rel=1e-3)
        assert each.collective_seconds == pytest.approx(12e-6 * each.compute_factor, rel=1e-3)
