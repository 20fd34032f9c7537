"""The step: the same parameters on one device and on eight, and those of a step by hand."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.metrics import mean_metrics
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.run import Run, prepare
from tests import tiny

LENET = ConfigDict({"name": "lenet"})
MOMENTUM = ConfigDict({"name": "momentum", "learning_rate": 0.1, "momentum": 0.9})


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("data",), axis_types=(AxisType.Auto,))


def batches(run: Run) -> Iterator[dict[str, np.ndarray]]:
    return data.TrainLoader(run.train_set, run.config.batch_size, run.config.seed)


def trained(run: Run, num_devices: int, num_steps: int) -> tuple[Any, list[dict[str, float]]]:
    mesh = mesh_of(num_devices)
    state = jax.jit(run.init, out_shardings=mesh_lib.replicated(mesh))(jax.random.key(0))
    step = step_lib.make_train_step(run.task, run.tx, mesh)
    metrics = []
    for batch, _ in zip(batches(run), range(num_steps)):
        state, values = step(state, mesh_lib.shard_batch(batch, mesh))
        metrics.append(mean_metrics([values]))
    return state, metrics


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": MOMENTUM}, {"model": LENET}],
    ids=["lamb", "momentum", "lamb with dropout"],
)
def test_eight_devices_give_what_one_gives(tmp_path, changes: dict[str, Any]) -> None:
    run = prepare(tiny.digits(duration="24 steps", **changes), tmp_path)
    (one, metrics_one), (eight, metrics_eight) = (trained(run, n, 24) for n in (1, 8))
    start = tiny.arrays(jax.jit(run.init)(jax.random.key(0)).params)
    moved, found, expected = 0.0, tiny.arrays(eight.params), tiny.arrays(one.params)
    for name, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, atol=2e-4 * scale, err_msg=name)
        moved = max(moved, np.abs(value - start[name]).max() / scale)
    assert moved > 0.05  # or else they agree because nothing happened
    assert int(one.step) == int(eight.step) == 24
    for of_one, of_eight in zip(metrics_one, metrics_eight, strict=True):
        for name in of_one:
            np.testing.assert_allclose(of_eight[name], of_one[name], rtol=1e-3, err_msg=name)
    assert metrics_one[-1]["loss"] < 0.9 * metrics_one[0]["loss"]


def test_gradient_is_that_of_a_step_by_hand(tmp_path) -> None:
    sgd = ConfigDict({"name": "sgd", "learning_rate": 1.0})
    run = prepare(
        tiny.digits(optimizer=sgd, schedule__warmup="0 steps", schedule__decay="constant"), tmp_path
    )
    before = jax.jit(run.init)(jax.random.key(0)).params
    after, metrics = trained(run, 8, 1)
    batch = next(batches(run))

    def loss(params: Any) -> jax.Array:
        x = jnp.asarray(batch["image"], jnp.float32).reshape(64, -1) / 16
        x = jnp.maximum(x @ params["hidden0"]["kernel"] + params["hidden0"]["bias"], 0)
        logits = x @ params["output"]["kernel"] + params["output"]["bias"]
        chosen = jnp.take_along_axis(logits, batch["label"][:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)

    value, grads = jax.value_and_grad(loss)(before)
    expected = tiny.arrays(optax.apply_updates(before, jax.tree.map(jnp.negative, grads)))
    for name, leaf in tiny.arrays(after.params).items():
        np.testing.assert_allclose(leaf, expected[name], atol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics[0]["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(metrics[0]["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics[0]["param_norm"], optax.tree.norm(after.params), rtol=1e-6)


def test_abstract_state_is_that_of_the_state(tmp_path) -> None:
    run = prepare(tiny.digits(), tmp_path)
    state = jax.jit(run.init, out_shardings=mesh_lib.replicated(run.mesh))(jax.random.key(0))
    facts = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
    assert facts == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), run.abstract_state
    )
    assert int(state.step) == 0


def test_key_decides_the_first_parameters(tmp_path) -> None:
    init = jax.jit(prepare(tiny.digits(), tmp_path).init)
    kernels = [tiny.arrays(init(jax.random.key(seed)).params) for seed in (0, 0, 1)]
    name = "['hidden0']['kernel']"
    assert (kernels[0][name] == kernels[1][name]).all()
    assert (kernels[0][name] != kernels[2][name]).any()


class Noise:
    """A task that logs the random number it was given, and learns nothing."""

    def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        noise = {"noise": (jax.random.uniform(key), jnp.float32(1))}
        return (jnp.sum(params["w"]), jnp.float32(1)), (model_state, noise)


def test_each_update_draws_from_its_own_key() -> None:
    mesh, tx = mesh_of(8), optax.sgd(0.0)
    params = {"w": jnp.zeros(2)}
    state = step_lib.TrainState(jnp.int32(5), params, {}, tx.init(params), jax.random.key(3))
    state = jax.device_put(state, mesh_lib.replicated(mesh))
    step = step_lib.make_train_step(Noise(), tx, mesh)
    for completed in (5, 6, 7):
        state, metrics = step(state, {"image": jnp.zeros(8)})
        expected = jax.random.uniform(jax.random.fold_in(jax.random.key(3), completed))
        assert float(metrics["noise"][0]) == float(expected)
    assert int(state.step) == 8
