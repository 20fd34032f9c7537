"""Tests every optimizer with unusual shapes, and with gradients whose squares exceed the range of float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.factory import OPTIMIZERS

SHAPES = {"empty": (0, 4), "empty vector": (0,), "kernel": (4, 3), "narrow": (2, 3), "number": ()}
# The 1-bit optimizers compress momentum from the second update on.
ARGUMENTS = {
    "apollo": {"rank": 1},
    "onebit_adam": {"freeze_step": 1},
    "onebit_lamb": {"freeze_step": 1},
    "zero_one_adam": {"var_freeze_step": 1},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_finite_and_fit(name):
    rng = np.random.default_rng(0)
    dtypes = {key: jnp.bfloat16 if key == "narrow" else jnp.float32 for key in SHAPES}

    def tree(factor):
        return {
            key: jnp.asarray(
                factor * rng.uniform(0.5, 1.0, shape) * rng.choice([-1.0, 1.0], shape), dtypes[key]
            )
            for key, shape in SHAPES.items()
        }

    tx = optim.make_optimizer({"name": name, "rules": "all", **ARGUMENTS.get(name, {})}, 0.1)
    params = tree(1.0)
    for factor in (1.0, 1e19, 1e-19):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(tree(factor), state, params)
        for key, update in updates.items():
            assert update.shape == SHAPES[key] and update.dtype == dtypes[key]
            assert jnp.isfinite(update).all(), (key, factor)
        assert factor != 1.0 or all(jnp.any(updates[key] != 0) for key in ("kernel", "number"))
