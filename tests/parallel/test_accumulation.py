"""Tests that microbatches give the gradient, metrics and running averages of the full batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.parallel import accumulation
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, WeightedSum, difference, trained

PLACES = [
    (1, {}),
    (8, {}),
    (8, {"parallel__backend": "shard_map"}),
    (8, {"parallel__backend": "shard_map", "parallel__optimizer_state": "zero1"}),
]


def gradients(
    p: np.ndarray, steps: int = 1, num_shards: int = 1, **batch: np.ndarray
) -> tuple[Any, ...]:
    """Returns the result of `accumulation.gradients` for `WeightedSum` on one device."""
    batch = {name: jnp.asarray(value, jnp.float32) for name, value in batch.items()}
    params, rows = {"p": jnp.asarray(p, jnp.float32)}, jnp.arange(len(batch["x"]))
    task = WeightedSum()
    return accumulation.gradients(
        task, params, {}, batch, task.weights(batch), jax.random.key(0), rows, steps, num_shards
    )


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_unequal_weights_are_those_of_one_batch(steps: int, num_shards: int) -> None:
    rng = np.random.default_rng(0)
    x, y, p = rng.normal(size=(24, 4)), rng.normal(size=24), rng.normal(size=4)
    # The first rows have almost no weight in one term, and the last rows in the other.
    w, v = np.arange(24.0) ** 2, np.arange(24.0)[::-1] ** 3
    grads, loss, state, sums = gradients(p, x=x, y=y, w=w, v=v, steps=steps, num_shards=num_shards)
    error, product = w * (x @ p - y) / w.sum(), v / v.sum()
    np.testing.assert_allclose(grads["p"], error @ x + product @ x, rtol=1e-5)
    error = np.sum(w * (x @ p - y) ** 2 / 2)
    np.testing.assert_allclose(loss, error / w.sum() + product @ x @ p, rtol=1e-5)
    assert state == {} and sums.keys() == {"error"}
    np.testing.assert_allclose(sums["error"], (error, w.sum()), rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
def test_term_without_weight_counts_for_nothing(steps: int) -> None:
    rng = np.random.default_rng(0)
    x, y, p = rng.normal(size=(4, 4)), rng.normal(size=4), rng.normal(size=4)
    grads, loss, *_ = gradients(p, x=x, y=y, w=np.zeros(4), v=np.ones(4), steps=steps)
    np.testing.assert_allclose(grads["p"], x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(loss, (x @ p).mean(), rtol=1e-6)
    grads, loss, *_ = gradients(p, x=x, y=y, w=np.zeros(4), v=np.zeros(4), steps=steps)
    assert loss == 0 and not np.any(grads["p"])


def test_sums_are_kept_in_float32() -> None:
    batch = {"x": jnp.ones((512, 4)), "y": jnp.zeros(512), "w": jnp.ones(512), "v": jnp.zeros(512)}
    params, task = {"p": jnp.full(4, 0.25, jnp.bfloat16)}, WeightedSum()
    grads, *_ = accumulation.gradients(
        task, params, {}, batch, task.weights(batch), jax.random.key(0), jnp.arange(512), steps=512
    )
    assert grads["p"].dtype == jnp.float32
    # The sum has 512 terms of 1/512; a bfloat16 sum would stop growing at a half.
    np.testing.assert_array_equal(grads["p"], 1)


def test_rows_stay_on_their_device() -> None:
    class Rows(WeightedSum):
        def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
            jax.debug.callback(lambda x: seen.append(np.asarray(x).tolist()), batch["x"])
            return {"rows": params["p"].sum()}, (model_state, {})

    seen: list[list[int]] = []
    accumulation.gradients(
        Rows(),
        {"p": jnp.ones(4)},
        {},
        {"x": jnp.arange(12)},
        {"rows": np.float32(12)},
        jax.random.key(0),
        jnp.arange(12),
        steps=2,
        num_shards=3,
    )
    jax.effects_barrier()
    assert sorted(seen) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.long
@pytest.mark.parametrize("num_devices, place", PLACES)
def test_dropout_and_ghost_batches_are_those_of_one_batch(
    num_devices: int, place: dict[str, Any]
) -> None:
    model = ConfigDict({**BATCH_NORM.to_dict(), "dropout_rate": 0.3, "group_size": 4})
    whole, sums_whole, _ = trained(1, 6, model=model)
    actual, sums, _ = trained(num_devices, 6, model=model, accumulation_steps=2, **place)
    # Statistics of four examples amplify rounding errors.
    assert difference(actual.params, whole.params) < 5e-6
    assert difference(actual.model_state, whole.model_state) < 5e-6
    for name, (total, weight) in sums_whole[-1].items():
        np.testing.assert_allclose(sums[-1][name], (total, weight), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("num_devices, place", PLACES)
@pytest.mark.parametrize("group_size", some([None, 8], (8,)))
def test_groups_are_those_of_a_microbatch_on_any_devices(
    group_size: int | None, num_devices: int, place: dict[str, Any]
) -> None:
    """With 4 microbatches of 16 rows, BatchNorm gives the same results as with one batch of 64 rows.

    The groups have the same size in both cases; with group_size None, a group is a full microbatch.
    The results do not depend on the number of devices.
    """

    def model(size: int | None) -> ConfigDict:
        return ConfigDict({**BATCH_NORM.to_dict(), "dropout_rate": 0.2, "group_size": size})

    whole, _, _ = trained(1, 4, model=model(group_size or 16))
    actual, _, _ = trained(num_devices, 4, model=model(group_size), accumulation_steps=4, **place)
    # The first updates of LAMB amplify rounding errors. With groups of another size the relative
    # difference would be a half.
    assert difference(actual.params, whole.params) < 1e-5
    assert difference(actual.model_state, whole.model_state) < 1e-5
    other, _, _ = trained(1, 4, model=model(None))
    assert difference(actual.params, other.params) > 1e-4


def test_schedule_counts_updates_not_microbatches() -> None:
    state, _, _ = trained(8, 3, model=DROPOUT, accumulation_steps=2)
    assert int(state.step) == int(state.opt_state.count) == 3


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_carried_fields_keep_their_rows(steps: int, num_shards: int) -> None:
    class Counter(WeightedSum):
        def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
            terms, (state, sums) = super().loss(params, model_state, batch, key)
            return terms, ({**state, "carry": batch["carry"] + batch["x"][:, :2]}, sums)

    rng = np.random.default_rng(0)
    x, old = rng.normal(size=(24, 4)), rng.normal(size=(24, 2))
    batch = {"x": jnp.asarray(x), "y": jnp.zeros(24), "w": jnp.ones(24), "v": jnp.ones(24)}
    task = Counter()
    _, _, state, _ = accumulation.gradients(
        task,
        {"p": jnp.ones(4)},
        {},
        {**batch, "carry": jnp.asarray(old)},
        task.weights(batch),
        jax.random.key(0),
        jnp.arange(24),
        steps,
        num_shards,
        carried=("carry",),
    )
    assert state.keys() == {"carry"}
    np.testing.assert_allclose(state["carry"], old + x[:, :2], rtol=1e-6)
