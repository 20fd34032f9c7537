"""Tests that each of several runs in one program has the same result as in a separate program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel import side_by_side as side_by_side_lib
from lamb_tpu.parallel.side_by_side import side_by_side


@pytest.mark.parametrize("batched", [True, False])
def test_each_run_has_its_own_state_and_batch(batched: bool) -> None:
    def update(state, batch, held):
        drawn = jax.random.normal(jax.random.fold_in(state["key"], state["step"]), (3,))
        new = {
            "key": state["key"],
            "step": state["step"] + 1,
            "w": state["w"] + batch["x"] @ held["table"] + drawn,
        }
        return new, {"loss": (new["w"].sum(), jnp.ones(()))}

    states = tuple(
        {"key": jax.random.key(seed), "step": jnp.int32(seed), "w": jnp.full(3, float(seed))}
        for seed in range(4)
    )
    batches = tuple({"x": jnp.arange(2.0) + seed} for seed in range(4))
    held = {"table": jnp.arange(6.0).reshape(2, 3)}
    new, sums = jax.jit(side_by_side(update, batched))(states, batches, held)
    assert len(new) == len(sums) == 4
    for state, batch, actual, metrics in zip(states, batches, new, sums):
        expected, losses = update(state, batch, held)
        np.testing.assert_allclose(actual["w"], expected["w"], rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"][0], losses["loss"][0], rtol=1e-6)
        assert actual["step"] == expected["step"] and actual["step"].shape == ()
        assert (jax.random.key_data(actual["key"]) == jax.random.key_data(state["key"])).all()


@pytest.mark.parametrize("platform, expected", [("cpu", False), ("gpu", True), ("tpu", True)])
def test_an_accelerator_shares_the_operations(platform: str, expected: bool) -> None:
    class Device:
        pass

    Device.platform = platform
    mesh = type("Mesh", (), {"devices": np.array([Device()])})
    assert side_by_side_lib.is_batched(mesh) is expected
