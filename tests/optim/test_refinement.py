"""Compares the refined schedule with its formula in plain loops, and tests special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from lamb_tpu.optim.refinement import _median_filter, refined_schedule


def _values(schedule, count):
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(count)))


def _by_the_formula(norms, power):
    weights = [norm**power for norm in norms]
    rates = [weights[t] * sum(weights[t + 1 :]) / sum(weights) for t in range(len(norms))]
    return np.array(rates) / max(rates)


@pytest.mark.parametrize("norm, power", [("l2", -2), ("l1", -1)])
def test_the_formula(norm, power):
    norms = np.random.default_rng(0).lognormal(size=50)
    schedule = refined_schedule(norms, peak=0.3, norm=norm, smoothing=0.0)
    np.testing.assert_allclose(
        _values(schedule, 50), 0.3 * _by_the_formula(norms, power), rtol=1e-5, atol=1e-7
    )
    with jax.enable_x64(True):
        schedule = refined_schedule(norms, peak=0.3, norm=norm, smoothing=0.0)
        np.testing.assert_allclose(
            _values(schedule, 50), 0.3 * _by_the_formula(norms, power), rtol=1e-12
        )


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_norms_that_do_not_change_give_the_line_to_zero(norm, smoothing):
    schedule = refined_schedule(np.full(101, 7.0), peak=2.0, norm=norm, smoothing=smoothing)
    np.testing.assert_allclose(
        _values(schedule, 103), [2 - 0.02 * t for t in range(101)] + [0, 0], rtol=1e-6, atol=2e-7
    )


def test_corners():
    schedule = refined_schedule([8.0, 4.0, 1.0, 1.0, 2.0], peak=0.5, smoothing=0.0)
    values = _values(schedule, 8)
    assert values.dtype == np.float32 and values.max() == 0.5 and values[2] == 0.5
    assert values[0] < values[1] < values[2]  # large first gradients cause a warm-up
    np.testing.assert_array_equal(values[4:], 0.0)  # the last update, and after it


def test_the_scale_of_the_norms_does_not_matter():
    norms = np.array([3.0, 2.0, 1.0, 2.0])
    for scale in (1e-30, 1e30):
        np.testing.assert_allclose(
            _values(refined_schedule(scale * norms, 1.0, smoothing=0.0), 4),
            _values(refined_schedule(norms, 1.0, smoothing=0.0), 4),
            rtol=1e-6,
        )


def test_samples_are_interpolated_over_a_run():
    few = refined_schedule(np.full(11, 1.0), peak=1.0, total_steps=1001, smoothing=0.0)
    np.testing.assert_allclose(_values(few, 1001), np.linspace(1, 0, 1001), rtol=1e-5, atol=1e-6)
    norms = [8.0, 4.0, 1.0, 1.0, 2.0]
    own = _values(refined_schedule(norms, 1.0, smoothing=0.0), 5)
    longer = _values(refined_schedule(norms, 1.0, total_steps=9, smoothing=0.0), 9)
    np.testing.assert_allclose(longer[::2], own, rtol=1e-6)
    np.testing.assert_allclose(longer[1::2], (own[1:] + own[:-1]) / 2, rtol=1e-6)


@pytest.mark.parametrize("size, width", [(40, 1), (40, 5), (40, 39), (41, 41), (300, 31)])
def test_median_filter_is_the_authors(size, width):
    values = np.random.default_rng(size).integers(0, 9, size).astype(float)  # with ties
    padded = np.pad(values, (0, 2 * width), mode="reflect")
    expected = scipy.ndimage.median_filter(padded, size=width, mode="nearest")[: -2 * width]
    np.testing.assert_array_equal(_median_filter(values, width), expected)


def test_spikes_are_filtered_out():
    norms = np.ones(100)
    norms[[10, 50, 51]] = 100.0
    np.testing.assert_allclose(
        _values(refined_schedule(norms, 1.0), 100), np.linspace(1, 0, 100), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1.0], 1), r"gradient_norms=\[1.0\] must be a list of at least 2"),
        ((np.ones((2, 2)), 1), r"a list of at least 2 numbers, not an array of the shape \(2, 2\)"),
        (([1.0, 0.0], 1), "gradient_norms.1.=0.0 must be finite"),
        (([1.0, 2.0, np.nan], 1), "gradient_norms.2.=nan must be finite"),
        (([np.inf, 2.0], 1), "gradient_norms.0.=inf must be finite"),
        (([1.0, 2.0], 0), "peak=0 must be above 0"),
        (([1.0, 2.0], 1, 1), "total_steps=1 must be a whole number of at least 2"),
        (([1.0, 2.0], 1, None, "linf"), "norm='linf' must be one of l2, l1"),
        (([1.0, 2.0], 1, None, "l2", 1.5), r"smoothing=1.5 must be between 0 and 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        refined_schedule(*arguments)
