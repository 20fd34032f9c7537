"""Microbatches: gradient, metrics and running averages of the batch they are cut from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.parallel import accumulation
from tests.parallel.nets import BATCH_NORM, DROPOUT, WeightedSum, difference, trained

PLACES = [
    (1, {}), (8, {}), (8, {"parallel__backend": "shard_map"}),
    (8, {"parallel__backend": "shard_map", "parallel__optimizer_state": "zero1"}),
]


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_unequal_weights_are_those_of_one_batch(steps: int, num_shards: int) -> None:
    rng = np.random.default_rng(0)
    x, y, p = rng.normal(size=(24, 4)), rng.normal(size=24), rng.normal(size=4)
    w = np.arange(24.0) ** 2  # the first rows weigh next to nothing
    batch = {name: jnp.asarray(v, jnp.float32) for name, v in dict(x=x, y=y, w=w).items()}
    grads, weight, state, sums = accumulation.gradients(
        WeightedSum(), {"p": jnp.asarray(p, jnp.float32)}, {}, batch, jax.random.key(0),
        jnp.arange(24), steps, num_shards,
    )
    np.testing.assert_allclose(grads["p"], (w * (x @ p - y)) @ x, rtol=1e-5)
    assert float(weight) == w.sum() and state == {}
    loss = np.sum(w * (x @ p - y) ** 2 / 2)
    np.testing.assert_allclose(sums["loss"], (loss, w.sum()), rtol=1e-6)
    np.testing.assert_allclose(sums["error"], (loss, w.sum()), rtol=1e-6)


def test_sums_are_kept_in_float32() -> None:
    batch = {"x": jnp.ones((256, 4)), "y": jnp.zeros(256), "w": jnp.ones(256)}
    params = {"p": jnp.full(4, 0.25, jnp.bfloat16)}
    grads, *_ = accumulation.gradients(
        WeightedSum(), params, {}, batch, jax.random.key(0), jnp.arange(256), steps=256
    )
    assert grads["p"].dtype == jnp.float32
    # 256 ones added up; bfloat16 would stop counting before
    np.testing.assert_array_equal(grads["p"], 256)


def test_rows_stay_on_their_device() -> None:
    class Rows(WeightedSum):
        def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
            jax.debug.callback(lambda x: seen.append(np.asarray(x).tolist()), batch["x"])
            return (params["p"].sum(), jnp.float32(1)), (model_state, {})

    seen: list[list[int]] = []
    accumulation.gradients(
        Rows(), {"p": jnp.ones(4)}, {}, {"x": jnp.arange(12)}, jax.random.key(0), jnp.arange(12),
        steps=2, num_shards=3,
    )
    jax.effects_barrier()
    assert sorted(seen) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.parametrize("num_devices, place", PLACES)
def test_dropout_and_ghost_batches_are_those_of_one_batch(
    num_devices: int, place: dict[str, Any]
) -> None:
    model = ConfigDict({**BATCH_NORM.to_dict(), "dropout_rate": 0.3, "group_size": 4})
    whole, sums_whole, _ = trained(1, 6, model=model)
    found, sums, _ = trained(num_devices, 6, model=model, accumulation_steps=2, **place)
    # Statistics of four examples enlarge what rounding leaves.
    assert difference(found.params, whole.params) < 5e-6
    assert difference(found.model_state, whole.model_state) < 5e-6
    for name, (total, weight) in sums_whole[-1].items():
        np.testing.assert_allclose(sums[-1][name], (total, weight), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("num_devices, place", PLACES)
@pytest.mark.parametrize("group_size", [None, 8])
def test_groups_are_those_of_a_microbatch_on_any_devices(
    group_size: int | None, num_devices: int, place: dict[str, Any]
) -> None:
    """Microbatches of 16: as many groups of one, or two, over several devices as the batch has."""
    def model(size: int | None) -> ConfigDict:
        return ConfigDict({**BATCH_NORM.to_dict(), "dropout_rate": 0.2, "group_size": size})

    whole, _, _ = trained(1, 4, model=model(group_size or 16))
    found, _, _ = trained(
        num_devices, 4, model=model(group_size), accumulation_steps=4, **place
    )
    # The first updates of LAMB enlarge what rounding leaves; other groups differ by a half.
    assert difference(found.params, whole.params) < 1e-5
    assert difference(found.model_state, whole.model_state) < 1e-5
    other, _, _ = trained(1, 4, model=model(None))
    assert difference(found.params, other.params) > 1e-4


def test_schedule_counts_updates_not_microbatches() -> None:
    state, _, _ = trained(8, 3, model=DROPOUT, accumulation_steps=2)
    assert int(state.step) == int(state.opt_state.count) == 3
