"""Tests the three parts of an update: `accumulate`, `exchange` and `apply`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import parameters
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel import update as update_lib
from lamb_tpu.parallel.backends import JitBackend
from lamb_tpu.parallel.layout import make_layout
from tests.parallel.nets import WeightedSum

ROWS = 8
NO_PARTS = ()


def batch_of() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 4)), random.normal(size=ROWS)
    fields = {"x": x, "y": y, "w": np.arange(ROWS), "v": np.arange(ROWS)[::-1]}
    return {name: jnp.asarray(value, jnp.float32) for name, value in fields.items()}


def prepared(tx: optax.GradientTransformation) -> tuple[JitBackend, state_lib.TrainState]:
    """Returns a backend for one device, and the state before the first update."""
    init = state_lib.make_init(WeightedSum(), tx, batch_of(), NO_PARTS)
    state = init(jax.random.key(0))
    mesh = mesh_lib.make_mesh({"data": 1}, jax.devices()[:1])
    metadata = parameters.resolve(state.params, "all")
    return JitBackend(make_layout(state.params, mesh, metadata)), state


def gradient(state: state_lib.TrainState) -> np.ndarray:
    x, y, w, v = (np.asarray(batch_of()[name], np.float64) for name in "xywv")
    error = x @ np.asarray(state.params["p"], np.float64) - y
    return (w * error / w.sum() + v / v.sum()) @ x


def test_the_parts_one_after_the_other_are_the_update() -> None:
    tx = optax.sgd(0.5)
    backend, state = prepared(tx)
    task, batch = WeightedSum(), batch_of()
    expected, metrics = jax.jit(
        update_lib.make_update(task, tx, backend, accumulation_steps=2, parts=NO_PARTS)
    )(state, batch)
    gradients = jax.jit(
        lambda state, batch: update_lib.accumulate(task, backend, NO_PARTS, state, batch, 2)
    )(state, batch)
    np.testing.assert_allclose(gradients.grads["p"], gradient(state), rtol=1e-5)
    exchanged = update_lib.exchange(tx, backend, state, gradients)
    assert exchanged.apply is None and exchanged.residual == ()
    actual, sums = update_lib.apply(tx, backend, NO_PARTS, state, gradients, exchanged)
    np.testing.assert_allclose(actual.params["p"], expected.params["p"], rtol=1e-6)
    assert sums.keys() == metrics.keys() and int(actual.step) == 1
    moved = np.asarray(state.params["p"]) - np.asarray(actual.params["p"])
    np.testing.assert_allclose(moved, 0.5 * gradient(state), rtol=1e-5)


def test_a_message_replaces_the_gradient() -> None:
    seen: list[Any] = []

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        seen.append(extra)
        return jax.tree.map(lambda g: -g, grads), state

    def message(grads: Any, state: Any, params: Any, *, stage: Any, num_devices: int) -> Any:
        seen.append((stage, num_devices))
        sent = jax.tree.map(lambda g: 3 * g, grads)
        return sent, lambda sums: (jax.tree.map(lambda m: -2 * m, sums), state)

    tx = Reducing(lambda params: (), update, message, lambda count: "sent" if count else None)
    backend, state = prepared(tx)
    for stage, factor in ((None, 1.0), ("sent", 6.0)):
        step = update_lib.make_update(
            WeightedSum(), tx, backend, parts=NO_PARTS, skip_nonfinite=True, stage=stage
        )
        actual, metrics = jax.jit(step)(state, batch_of())
        moved = np.asarray(state.params["p"]) - np.asarray(actual.params["p"])
        np.testing.assert_allclose(moved, factor * gradient(state), rtol=1e-4)
        # `grad_norm` is the norm of the message that was sent.
        sent = np.linalg.norm(gradient(state)) * (1.0 if stage is None else 3.0)
        np.testing.assert_allclose(metrics["grad_norm"][0], sent, rtol=1e-5)
    assert seen == [{"stage": None}, ("sent", 1)]
    # In every stage, metrics that were measured before the exchange are among the sums.
    for stage in (None, "sent"):

        def step(state: Any, batch: Any, stage: Any = stage) -> Any:
            gradients = update_lib.accumulate(WeightedSum(), backend, NO_PARTS, state, batch)
            gradients = gradients._replace(measured={"variance": (jnp.ones(()), jnp.ones(()))})
            sent = update_lib.exchange(tx, backend, state, gradients, stage)
            return update_lib.apply(tx, backend, NO_PARTS, state, gradients, sent)[1]

        assert tuple(map(float, jax.jit(step)(state, batch_of())["variance"])) == (1, 1)
