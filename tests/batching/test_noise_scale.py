"""Tests the noise scale: unbiased pairs of estimates, their averages, and a negative |G|^2."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.batching import noise_scale
from lamb_tpu.batching.noise_scale import Estimate


def test_the_pair_is_the_sample_variance_of_microbatches() -> None:
    """With `small_sq` from microbatch gradients of 4 examples, the trace is 4 times their variance."""
    gradients = np.random.default_rng(0).normal(0.3, 1.0, (8, 50))
    mean = gradients.mean(axis=0)
    pair = noise_scale.estimate(
        float(np.mean(np.sum(gradients**2, axis=1))), float(mean @ mean), small=4, large=32
    )
    variance = gradients.var(axis=0, ddof=1).sum()
    assert pair.trace == pytest.approx(4 * variance, rel=1e-12)
    assert pair.grad_sq == pytest.approx(mean @ mean - variance / 8, rel=1e-12)


def test_the_pair_has_no_bias() -> None:
    rng, pairs = np.random.default_rng(1), []
    truth = np.full(20, 0.2)  # |G|^2 is 0.8, the trace 20
    for _ in range(2000):
        gradients = truth + rng.normal(0.0, 1.0, (16, 20)) / math.sqrt(2)  # microbatches of 2
        mean = gradients.mean(axis=0)
        pairs.append(
            noise_scale.estimate(
                np.mean(np.sum(gradients**2, axis=1)), mean @ mean, small=2, large=32
            )
        )
    grad_sq, trace = np.mean(pairs, axis=0)
    assert grad_sq == pytest.approx(0.8, rel=0.03) and trace == pytest.approx(20, rel=0.01)


def test_averages_have_no_bias_from_the_start_and_the_ratio_is_of_averages() -> None:
    state = noise_scale.init()
    assert math.isnan(noise_scale.noise_scale(state))
    assert all(math.isnan(value) for value in noise_scale.averages(state))
    for pair in (Estimate(1.0, 8.0), Estimate(3.0, 0.0)):
        state = noise_scale.update(state, pair, decay=0.5)
    # The two estimates have weights of 1/3 and 2/3.
    np.testing.assert_allclose(noise_scale.averages(state), [7 / 3, 8 / 3])
    assert noise_scale.noise_scale(state) == pytest.approx(8 / 7)  # the mean of ratios is 8 / 3


@pytest.mark.parametrize(
    "pair, floor, expected",
    [
        (Estimate(-1.0, 5.0), 0.0, math.inf),
        (Estimate(0.0, 5.0), 0.0, math.inf),
        (Estimate(0.0, 0.0), 0.0, math.inf),
        (Estimate(2.0, -1.0), 0.0, 0.0),
        (Estimate(-1.0, 5.0), -math.inf, -5.0),
        (Estimate(-1.0, 5.0), 1e-8, 2.5e8),
    ],
)
def test_a_negative_square_has_one_rule(pair: Estimate, floor: float, expected: float) -> None:
    state = noise_scale.update(noise_scale.init(), pair, decay=0.5)
    assert noise_scale.noise_scale(state, floor) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_overflow_changes_nothing(bad: float) -> None:
    state = noise_scale.update(noise_scale.init(), Estimate(2.0, 6.0), decay=0.9)
    for pair in (Estimate(bad, 1.0), Estimate(1.0, bad)):
        np.testing.assert_array_equal(noise_scale.update(state, pair, decay=0.9), state)


def test_under_jit_as_on_the_host() -> None:
    @jax.jit
    def two(small_sq, large_sq):
        state = jax.tree.map(jnp.float32, noise_scale.init())
        for scale in (1.0, 0.5):
            pair = noise_scale.estimate(small_sq * scale, large_sq, 4, 16)
            state = noise_scale.update(state, pair, 0.9)
        return noise_scale.noise_scale(state)

    state = noise_scale.init()
    for scale in (1.0, 0.5):
        state = noise_scale.update(state, noise_scale.estimate(5.0 * scale, 2.0, 4, 16), 0.9)
    assert float(two(5.0, 2.0)) == pytest.approx(float(noise_scale.noise_scale(state)), rel=1e-5)


def test_a_traced_number_of_examples() -> None:
    actual = jax.jit(lambda large: noise_scale.estimate(5.0, 2.0, 4, large))(16.0)
    assert actual == pytest.approx(noise_scale.estimate(5.0, 2.0, 4, 16))


def test_errors() -> None:
    with pytest.raises(ValueError, match="small=8 must be below large=8, because"):
        noise_scale.estimate(1.0, 1.0, 8, 8)
    with pytest.raises(ValueError, match="small=8 must be below large=nan, because"):
        noise_scale.estimate(1.0, 1.0, 8, math.nan)
    with pytest.raises(ValueError, match="small=0 must be above 0"):
        noise_scale.estimate(1.0, 1.0, 0, 8)
    with pytest.raises(ValueError, match="decay=1.0 must be at least 0 and below 1"):
        noise_scale.update(noise_scale.init(), Estimate(1.0, 1.0), 1.0)


@pytest.mark.parametrize("batches, actual", [(4, 1.0), (32, 1.4)])
def test_a_ratio_of_l1_norms_saturates(batches: int, actual: float) -> None:
    """The saturation shows that sign descent has no noise scale; a guide in docs quotes these numbers."""
    rng, size, batch, parts = np.random.default_rng(0), 20_000, 64, 8
    deviations, true = np.exp(rng.normal(size=size)), rng.normal(size=size)
    true *= deviations
    # Scale the gradient so that the noise scale, the squared ratio of the l1 norms, is `batches`.
    true *= deviations.sum() / np.abs(true).sum() / np.sqrt(batches * batch)
    noise = rng.normal(size=(parts, size)) * deviations / np.sqrt(batch / parts)
    grads = true + noise
    spread = np.sqrt(grads.var(0, ddof=1) * batch / parts).sum()
    ratio = (spread / np.abs(grads.mean(0)).sum()) ** 2 / batch
    assert ratio == pytest.approx(actual, abs=0.06)
