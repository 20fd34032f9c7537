"""Tests 1-bit Adam: warm-up, frozen second moments, and elements without a gradient."""

import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5])}


def test_three_updates_by_hand():
    tx = optim.onebit_adam(0.1, freeze_step=2, b2=0.9, eps=0.1, weight_decay=0.5)
    state, m, v = tx.init(PARAMS), np.zeros(3), np.zeros(3)
    for number, gradient in enumerate(([1.0, 2.0, -1.0], [0.5, 0.0, 3.0], [2.0, 2.0, 2.0])):
        g = np.array(gradient)
        updates, state = tx.update({"w": jnp.asarray(g, jnp.float32)}, state, PARAMS)
        m = 0.9 * m + 0.1 * g
        v = 0.9 * v + 0.1 * g * g if number < 2 else v
        expected = -0.1 * (m / (np.sqrt(v) + 0.1) + 0.5 * np.asarray(PARAMS["w"]))
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)
        np.testing.assert_allclose(state.nu["w"], v, rtol=1e-5)


@pytest.mark.parametrize("mask_unseen", [True, False])
def test_elements_without_a_gradient_before(mask_unseen):
    """Without a mask or a floor, the momentum of elements without gradient is divided by eps."""
    tx = optim.onebit_adam(0.1, freeze_step=1, mask_unseen=mask_unseen, relative_floor=0.0)
    state = tx.init(PARAMS)
    _, state = tx.update({"w": jnp.array([1.0, 1.0, 0.0])}, state, PARAMS)

    def sent(tree):  # signs, as after the exchange
        return {"w": jnp.array([1.0, -1.0, 1.0])}

    message, apply = tx.message(PARAMS, state, PARAMS, stage=tx.stage(1))
    updates, _ = apply(sent(message))
    assert updates["w"][2] == 0.0 if mask_unseen else updates["w"][2] < -1e6
