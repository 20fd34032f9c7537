"""Tests that jit, shard_map and pmap give the same parameters, on 1 and on 8 devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from lamb_tpu import data, models, tasks
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import backends
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.parallel.components import Averages, Skipped
from lamb_tpu.parallel.exchange import make_exchange
from lamb_tpu.parallel.layout import make_layout
from lamb_tpu.parallel.update import make_update
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.marks import some
from tests.parallel.nets import (
    BATCH_NORM,
    DROPOUT,
    LAMB,
    LARS,
    SHARD_MAP,
    ZERO1,
    WeightedSum,
    difference,
    trained,
)

AVERAGED = (Averages(0.999), Skipped())

NUM_STEPS = 20
NETS = {"batch_norm": BATCH_NORM, "dropout": DROPOUT}
OPTIMIZERS = {"lamb": LAMB, "lars": LARS}


def on_one(net: str, name: str) -> Any:
    """Returns the state after `NUM_STEPS` updates on one device, the sums of each update, and the run."""
    return trained(1, NUM_STEPS, duration="20 steps", model=NETS[net], optimizer=OPTIMIZERS[name])


FSDP = ZERO1 | {"mesh__data": 2, "mesh__fsdp": 4, "parallel__rules": (("hidden./kernel", "fsdp"),)}
PLACES = {
    "jit": {},
    "shard_map": SHARD_MAP,
    "jit zero1": ZERO1,
    "shard_map zero1": SHARD_MAP | ZERO1,
    "jit fsdp": FSDP,
    "shard_map fsdp": SHARD_MAP | FSDP,
    "jit tensor": ZERO1
    | {
        "mesh__model": 2,
        "parallel__rules": (("hidden0/kernel", (None, "model")), ("hidden1/kernel", ("model",))),
    },
}


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS, ("lamb",)))
@pytest.mark.parametrize("net", some(NETS, ("batch_norm",)))
@pytest.mark.parametrize("place", PLACES)
def test_eight_devices_equal_one(place: str, net: str, optimizer: str) -> None:
    expected, sums_one, _ = on_one(net, optimizer)
    actual, sums, _ = trained(
        8,
        NUM_STEPS,
        duration="20 steps",
        model=NETS[net],
        optimizer=OPTIMIZERS[optimizer],
        **PLACES[place],
    )
    assert difference(actual.params, expected.params) < 1e-6
    if net == "batch_norm":
        assert difference(actual.model_state, expected.model_state) < 1e-6
    assert difference(actual.opt_state, expected.opt_state) < 1e-5
    start, _, _ = trained(
        1, 0, duration="20 steps", model=NETS[net], optimizer=OPTIMIZERS[optimizer]
    )
    # Otherwise the test would compare unchanged values.
    assert difference(expected.params, start.params) > 0.05
    for of_one, of_eight in zip(sums_one, sums, strict=True):
        assert of_one.keys() == of_eight.keys()
        for name in of_one:
            np.testing.assert_allclose(of_eight[name], of_one[name], rtol=1e-5, err_msg=name)
    assert sums[-1]["loss"][0] < sums[0]["loss"][0]


def test_batch_norm_over_the_full_batch_differs() -> None:
    expected, _, _ = on_one("batch_norm", "lamb")
    model = ConfigDict({**BATCH_NORM.to_dict(), "group_size": None})
    actual, _, _ = trained(8, NUM_STEPS, duration="20 steps", model=model, optimizer=LAMB)
    assert difference(actual.params, expected.params) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("net", NETS)
def test_the_same_function_runs_under_pmap(net: str) -> None:
    expected, _, run = on_one(net, "lamb")
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    config = run.spec
    model = models.build(config.model.name, ("data",), **config.model.fields)
    task = tasks.build(config.task.name, model, **config.task.fields)
    metadata = parameters.resolve(run.abstract_state.params, "no_bias_no_norm")
    layout = make_layout(run.abstract_state.params, mesh, metadata)
    update = jax.pmap(
        make_update(task, run.tx, backends.ShardMapBackend(layout, make_exchange(layout))),
        axis_name="data",
    )
    state = jax.jit(run.init)(jax.random.key(run.spec.seed))
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), state)
    loader = data.TrainLoader(run.train_set, config.batch_size, config.seed)
    for batch, _ in zip(loader, range(NUM_STEPS)):
        parts = {name: value.reshape(8, -1, *value.shape[1:]) for name, value in batch.items()}
        state, _ = update(state, parts)
    for device in (0, 5):
        actual = jax.tree.map(lambda x: x[device], state.params)
        assert difference(actual, expected.params) < 1e-6


@pytest.mark.long
def test_gradient_is_that_of_a_step_by_hand() -> None:
    sgd = ConfigDict({"name": "sgd", "learning_rate": 1.0})
    changes = dict(optimizer=sgd, schedule__warmup="0 steps", schedule__decay="constant")
    for backend in ("jit", "shard_map"):
        after, sums, run = trained(8, 1, parallel__backend=backend, **changes)
        before = jax.jit(run.init)(jax.random.key(0)).params
        batch = next(data.TrainLoader(run.train_set, 64, 0))

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
        total, weight = sums[0]["loss"]
        np.testing.assert_allclose(total / weight, value, rtol=1e-6)
        np.testing.assert_allclose(sums[0]["grad_norm"][0], optax.tree.norm(grads), rtol=1e-5)
        norm = optax.tree.norm(after.params)
        np.testing.assert_allclose(sums[0]["param_norm"][0], norm, rtol=1e-6)


@pytest.mark.long
def test_gradients_may_be_sent_in_bfloat16() -> None:
    changes = dict(model=DROPOUT, parallel__backend="shard_map")
    exact, _, _ = trained(8, 1, **changes, schedule__warmup="0 steps")
    for state in ("replicated", "zero1"):
        narrow, _, _ = trained(
            8,
            1,
            **changes,
            schedule__warmup="0 steps",
            parallel__exchange__name="bfloat16",
            parallel__optimizer_state=state,
        )
        assert 1e-6 < difference(narrow.params, exact.params) < 1e-2


@pytest.mark.long
def test_abstract_state_is_that_of_the_state() -> None:
    _, _, run = trained(8, 0, ema__decay=0.9, parallel__optimizer_state="zero1")
    step, batch = run.make_train_step(), next(data.TrainLoader(run.train_set, 64, 0))
    for state in (run.first_state(), step(run.first_state(), run.shard_batch(batch))[0]):
        metadata = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
        assert metadata == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), run.abstract_state
        )


@pytest.mark.long
@pytest.mark.parametrize("place", ["jit", "shard_map zero1"])
def test_average_of_the_weights(place: str) -> None:
    run = prepare(tiny.digits(model=BATCH_NORM, ema__decay=0.2, **PLACES[place]), None)
    state, step = run.first_state(), run.make_train_step()
    average = jax.device_get((state.params, state.model_state))
    loader = data.TrainLoader(run.train_set, 64, 0)
    for done in range(4):
        state, _ = step(state, run.shard_batch(next(loader)))
        decay = min(0.2, (1 + done) / (10 + done))
        values = jax.device_get((state.params, state.model_state))
        average = jax.tree.map(lambda e, x: decay * e + (1 - decay) * x, average, values)
    assert difference(state.ema, average) < 1e-6
    assert difference(state.ema[0], state.params) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("place", ["jit", "shard_map zero1"])
def test_update_that_is_not_finite_is_left_out(place: str) -> None:
    run = prepare(
        tiny.digits(model=BATCH_NORM, guards__max_skipped=2, ema__decay=0.5, **PLACES[place]), None
    )
    step = run.make_train_step()
    batches = [batch for batch, _ in zip(data.TrainLoader(run.train_set, 64, 0), range(2))]
    state, _ = step(run.first_state(), run.shard_batch(batches[0]))
    before = jax.device_get(state.replace(key=None))
    # One infinite example on one device suffices to skip the update.
    spoilt = {**batches[1], "image": batches[1]["image"].astype(np.float32)}
    spoilt["image"][17] = np.inf
    state, sums = step(state, run.shard_batch(spoilt))
    assert int(state.skipped) == 1 and int(state.step) == 2
    tiny.assert_equal(state.params, before.params)
    tiny.assert_equal(state.model_state, before.model_state)
    tiny.assert_equal(state.ema, before.ema)
    tiny.assert_equal(state.opt_state.nu, before.opt_state.nu)
    assert int(state.opt_state.count) == 2
    sums = jax.device_get(sums)
    assert sums.pop("skipped") == (1, 1)
    assert all(pair == (0, 0) for pair in sums.values())
    state, sums = step(state, run.shard_batch(batches[1]))
    assert int(state.skipped) == 1 and jax.device_get(sums["skipped"]) == (0, 1)
    assert difference(state.params, before.params) > 1e-4


def test_average_of_narrow_weights_moves() -> None:
    class Narrow(WeightedSum):
        def init(self, key: jax.Array, batch: Any) -> Any:
            return {"params": {"p": jnp.ones(4, jnp.bfloat16)}}

    rows = {"y": jnp.full(8, 40.0), "w": jnp.ones(8), "v": jnp.zeros(8)}
    batch = {"x": jnp.ones((8, 4)), **rows}
    mesh, tx = mesh_lib.make_mesh({"data": -1}), optax.sgd(0.02)
    init = state_lib.make_init(Narrow(), tx, batch, AVERAGED)
    abstract = jax.eval_shape(init, jax.random.key(0))
    metadata = parameters.resolve(abstract.params, "all")
    layout = make_layout(abstract.params, mesh, metadata, optimizer_state="zero1")
    shardings = state_lib.state_shardings(abstract, tx, layout, AVERAGED)
    step = step_lib.make_train_step(
        Narrow(),
        tx,
        layout,
        shardings,
        "shard_map",
        make_exchange(layout, full_precision=("p",)),
        parts=AVERAGED,
    )
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    expected = np.ones(4)
    for done in range(50):
        state, _ = step(state, batch)
        decay = min(0.999, (1 + done) / (10 + done))
        weights = np.asarray(state.params["p"], np.float64)
        expected = decay * expected + (1 - decay) * weights
    assert state.params["p"].dtype == jnp.bfloat16
    assert state.ema[0]["p"].dtype == jnp.float32
    # The compiler may use weights before they are rounded to bfloat16.
    np.testing.assert_allclose(state.ema[0]["p"], expected, rtol=2**-8)
    assert abs(expected[0] - weights[0]) > 1e-4


@pytest.mark.long
def test_full_batch_norm_over_two_batch_axes() -> None:
    model = ConfigDict({**BATCH_NORM.to_dict(), "group_size": None})
    whole, _, _ = trained(1, 5, model=model)
    actual, _, _ = trained(8, 5, model=model, **PLACES["shard_map fsdp"])
    assert difference(actual.params, whole.params) < 1e-6
    assert difference(actual.model_state, whole.model_state) < 1e-6


def test_key_decides_the_first_parameters(tmp_path: Any) -> None:
    init = jax.jit(prepare(tiny.digits(), tmp_path).init)
    kernels = [init(jax.random.key(seed)).params["hidden0"]["kernel"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


class Noise:
    """A task with the metric `noise`, a random number from the update's key."""

    def weights(self, batch: Any) -> dict[str, np.float32]:
        return {"nothing": np.float32(1)}

    def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        noise = {"noise": (jax.random.uniform(key), jnp.float32(1))}
        return {"nothing": jnp.sum(params["w"])}, (model_state, noise)


def test_each_update_draws_from_its_own_key() -> None:
    mesh, tx, params = mesh_lib.make_mesh({"data": -1}), optax.sgd(0.0), {"w": jnp.zeros(2)}
    done, skipped, key = jnp.int32(5), jnp.int32(0), jax.random.key(3)
    parts = {"ema": None, "skipped": skipped}
    state = state_lib.TrainState(done, params, {}, tx.init(params), key, parts)
    layout = make_layout(params, mesh, parameters.resolve(params, "all"))
    shardings = state_lib.state_shardings(state, tx, layout)
    state = jax.device_put(state, shardings)
    step = step_lib.make_train_step(Noise(), tx, layout, shardings)
    for completed in (5, 6, 7):
        state, metrics = step(state, {"image": jnp.zeros(8)})
        expected = jax.random.uniform(jax.random.fold_in(jax.random.key(3), completed))
        assert float(metrics["noise"][0]) == float(expected)
    assert int(state.step) == 8
