"""Cross entropy with smoothed labels, compared with Optax's loss for full target arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu.tasks.smoothing import smoothed_cross_entropy

LOGITS = jax.random.normal(jax.random.key(0), (2, 3, 7))
LABELS = jnp.array([[1, 6, 0], [2, 2, 5]])
WEIGHTS = jnp.array([[1, 1, 0], [1, 0, 1]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_equals_full_targets(smoothing: float) -> None:
    targets = optax.smooth_labels(jax.nn.one_hot(LABELS, 7), smoothing)
    expected = jnp.sum(WEIGHTS * optax.softmax_cross_entropy(LOGITS, targets))
    total, weight = smoothed_cross_entropy(LOGITS, LABELS, WEIGHTS, smoothing)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert float(weight) == 4


def test_sums_of_shards_add_up() -> None:
    full = smoothed_cross_entropy(LOGITS, LABELS, WEIGHTS, 0.1)
    parts = [
        smoothed_cross_entropy(LOGITS[n], LABELS[n], WEIGHTS[n], 0.1) for n in range(len(LOGITS))
    ]
    np.testing.assert_allclose(np.sum(parts, 0), full, rtol=1e-6)


def test_padding_may_have_any_logits() -> None:
    total, weight = smoothed_cross_entropy(LOGITS.at[0, 2].set(jnp.nan), LABELS, WEIGHTS, 0.1)
    expected, _ = smoothed_cross_entropy(LOGITS, LABELS, WEIGHTS, 0.1)
    assert float(total) == float(expected) and float(weight) == 4
