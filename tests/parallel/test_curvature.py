"""Compares the local Lipschitz estimate with explicit Hessians, and results on 8 devices with 1 device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, models, tasks
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.parallel.curvature import lipschitz
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from tests import tiny
from tests.parallel.nets import BATCH_NORM, DROPOUT, WeightedSum

ROWS = 64


def state(params: Any) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, {}, (), jax.random.key(3), {})


def test_two_terms_with_weights_as_numpy() -> None:
    rng = np.random.default_rng(0)
    batch = {
        name: rng.uniform(0.1, 1, shape).astype(np.float32)
        for name, shape in {"x": (8, 4), "y": (8,), "w": (8,), "v": (8,)}.items()
    }
    params = rng.normal(size=4).astype(np.float32)
    x, w, v = (batch[name].astype(np.float64) for name in "xwv")
    error = w * (x @ params - batch["y"]) / w.sum()
    gradient = x.T @ (error + v / v.sum())
    hessian = (x.T * w) @ x / w.sum()
    expected = gradient @ hessian @ gradient / (gradient @ gradient)
    estimate = jax.jit(functools.partial(lipschitz, WeightedSum()))
    actual = estimate(state({"p": jnp.asarray(params)}), batch)
    assert float(actual) == pytest.approx(expected, rel=1e-5)
    # A zero gradient has no direction.
    flat = {**batch, "x": np.zeros_like(batch["x"])}
    assert float(estimate(state({"p": jnp.asarray(params)}), flat)) == 0.0


@pytest.mark.long
def test_lstm_as_differences_of_its_gradient() -> None:
    """Uses float64, in which finite differences are exact to eight digits."""
    with jax.enable_x64(True):
        task = tasks.build(
            "classification", models.build("row_lstm", features=5, transform=4), input_std=1.0
        )
        rng = np.random.default_rng(0)
        batch = {"image": rng.normal(size=(6, 7, 3, 1)), "label": rng.integers(0, 10, 6)}
        params = jax.tree.map(
            lambda p: p.astype(jnp.float64), task.init(jax.random.key(0), batch)["params"]
        )

        @jax.jit
        @jax.grad
        def gradient(params: Any) -> jax.Array:
            terms, _ = task.loss(params, {}, batch, jax.random.key(0))
            return terms["cross_entropy"] / 6

        grads = gradient(params)
        length = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))

        def slope(distance: float) -> float:
            moved = jax.tree.map(lambda p, g: p + distance * g / length, params, grads)
            products = jax.tree.map(lambda g, d: np.vdot(g, d) / length, gradient(moved), grads)
            return sum(jax.tree.leaves(products))

        expected = abs(slope(1e-3) - slope(-1e-3)) / 2e-3
        actual = jax.jit(functools.partial(lipschitz, task))(state(params), batch)
        assert float(actual) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jit", "shard_map"])
@pytest.mark.parametrize("net", [BATCH_NORM, DROPOUT], ids=["batch_norm", "dropout"])
def test_eight_devices_equal_one(net: ConfigDict, backend: str) -> None:
    def estimate(devices: int, **changes: str) -> float:
        run = prepare(tiny.digits(model=net, **changes), None, jax.devices()[:devices])
        return float(step_lib.make_lipschitz_step(run.plain_task, run.mesh)(*_inputs(run)))

    expected = estimate(1)
    assert expected > 0
    actual = estimate(8, parallel__backend=backend, parallel__optimizer_state="zero1")
    assert actual == pytest.approx(expected, rel=1e-5)


def _inputs(run: Run) -> tuple[TrainState, Any]:
    first = jax.jit(run.init, out_shardings=run.shardings)(jax.random.key(0), {})
    rows = next(data.TrainLoader(run.train_set, ROWS, 0, rows_lib.local_rows(ROWS, run.mesh)))
    return first, rows_lib.shard_batch(rows, ROWS, run.mesh)
