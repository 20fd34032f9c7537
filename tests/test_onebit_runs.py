"""Tests optimizers that compress momentum, with the exchange onebit on eight devices."""

import pathlib
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.exchange.onebit import OneBit
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import prepare
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some
from tests.parallel.nets import difference
from tests.parallel.wire import wire_bytes
from tests.test_exchange_runs import after

FREEZE = 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "onebit_lamb": {"name": "onebit_lamb", "learning_rate": 0.02, "freeze_step": FREEZE},
    "onebit_adam": {"name": "onebit_adam", "learning_rate": 0.002, "freeze_step": FREEZE},
    "zero_one_adam": {
        "name": "zero_one_adam",
        "learning_rate": 0.002,
        "var_freeze_step": 6,
        "var_update_scaler": 2,
    },
}


def config(name: str = "onebit_lamb", **changes: Any) -> ConfigDict:
    optimizer = ConfigDict(OPTIMIZERS[name] | changes.pop("optimizer", {}))
    return tiny.digits(
        optimizer=optimizer,
        **{"parallel__backend": "shard_map", "parallel__exchange": ConfigDict({"name": "onebit"})}
        | changes,
    )


STAGES = {
    "onebit_lamb": [None] * FREEZE + ["compressed"] * 3,
    "onebit_adam": [None] * FREEZE + ["compressed"] * 3,
    "zero_one_adam": [
        None,
        None,
        "gradient",
        None,
        "gradient",
        None,
        "first synchronisation",
        "synchronisation",
    ],
}


@pytest.mark.parametrize("name", some(OPTIMIZERS, ("onebit_lamb",)))
def test_stages_and_residual(name: str) -> None:
    state, run = after(config(name), 8, 8)
    stages = [run.stage(update).of_optimizer for update in range(8)]
    assert [stage and stage.name for stage in stages] == STAGES[name]
    assert len({run.stage(update) for update in range(1000)}) <= 4  # at most 4 programs
    residual = state.parts["residual"]["kept"]
    assert all(
        np.abs(leaf).max() > 0 for leaf in jax.tree.leaves((residual.device, residual.split))
    )
    for leaf in jax.tree.leaves((state.params, state.opt_state)):  # the same bits on all devices
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all((other == first).all() for other in others)
    updates = 3 if name != "zero_one_adam" else 2
    warm, _ = after(config(name), 8, updates)
    plain, _ = after(config(name, **FLOAT32), 1, updates)
    assert difference(warm.params, plain.params) < 1e-5
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(warm.parts["residual"]["kept"].device))


def test_compressed_program_sends_bits() -> None:
    run = prepare(config(), None, jax.devices())
    (shapes,) = run.abstract_batches()
    sent = [
        wire_bytes(run.make_train_step(update).lower(run.abstract_state, shapes).compile())
        for update in (0, FREEZE)
    ]
    values = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    assert sent[0]["f32"] > 7 * values and "u8" not in sent[0]
    assert sent[1]["f32"] < 0.05 * sent[0]["f32"]  # only metrics are float32
    leaves = len(jax.tree.leaves(run.abstract_state.params))
    padding, scales = 64 * leaves, 4 * leaves  # each device sends its scales to all 7 others
    assert sent[1]["u8"] <= 2 * ((values + padding) / 8 * 7 / 8 + 7 * scales)


def twelve() -> ConfigDict:
    return config()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The workdir of a run with 5 uncompressed updates and then 7 compressed updates."""
    workdir = tmp_path_factory.mktemp("full")
    train(twelve(), workdir, quiet=True)
    return workdir


@pytest.mark.long
@pytest.mark.parametrize("last", [4, 8])
def test_resumed_is_uninterrupted(full: pathlib.Path, tmp_path: pathlib.Path, last: int) -> None:
    """The run resumes before or after the update at which the second moments are frozen."""
    resumed = tiny.cut(full, tmp_path / "cut", last)
    train(twelve(), resumed, quiet=True)
    actual = tiny.same_state(twelve(), resumed, full)
    assert int(actual.step) == 12 and np.abs(actual.parts["residual"]["kept"].device[0]).max() > 0


@pytest.mark.long
def test_killed_is_uninterrupted(full: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The run is killed as soon as the compressed stage has a checkpoint, and then resumed."""
    recipe = tiny.recipe(tmp_path, "twelve()", "tests.test_onebit_runs.twelve")
    workdir = tmp_path / "killed"
    process = tiny.start("lamb_tpu.train", recipe, f"--workdir={workdir}", devices=8)
    try:
        deadline = time.time() + 300
        while not (workdir / "checkpoints" / "8").exists() and process.poll() is None:
            assert time.time() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    train(twelve(), workdir, quiet=True)
    tiny.same_state(twelve(), workdir, full)


FLOAT32 = {"parallel__exchange": ConfigDict({"name": "float32"})}
REJECTED: list[tuple[str, dict[str, Any], str]] = [
    ("onebit_lamb", FLOAT32, "set config.parallel.exchange.name='onebit'"),
    (
        "onebit_adam",
        {"parallel__backend": "jit", **FLOAT32},
        "use config.parallel.backend='shard_map'",
    ),
    (
        "onebit_lamb",
        {"parallel__optimizer_state": "zero1"},
        "set config.parallel.optimizer_state='replicated'",
    ),
    (
        "zero_one_adam",
        {"optimizer": {"local_step_clipper": 4}},
        "set config.optimizer.local_step_clipper=1",
    ),
    (
        "onebit_lamb",
        {"parallel__exchange": ConfigDict({"name": "onebit", "multiple": 9})},
        "config.parallel.exchange.multiple=9 is not a multiple of 8; use 8 or 16",
    ),
    (
        "onebit_lamb",
        {"optimizer": {"freeze_step": 0}},
        "freeze_step=0 must be a whole number of at least 1",
    ),
]


@pytest.mark.parametrize("name, changes, said", REJECTED)
def test_rejected(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        prepare(config(name, **changes), None, jax.devices())
    assert said in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jit", "shard_map"])
def test_one_device_compresses_nothing(backend: str) -> None:
    """Only the moments are frozen, as in DeepSpeed with a single worker."""
    state, _ = after(config(parallel__backend=backend, **FLOAT32), 1, 8)
    other, _ = after(config(parallel__backend="shard_map", **FLOAT32), 1, 8)
    assert isinstance(state, TrainState) and "residual" not in state.parts
    assert difference(state.params, other.params) < 1e-5
    assert float(state.opt_state.scaling["hidden0"]["kernel"].ravel()[0]) > 0


@pytest.mark.long
def test_plain_gradients_in_one_bit() -> None:
    momentum = ConfigDict({"name": "momentum", "learning_rate": 0.02})
    plain = tiny.digits(
        optimizer=momentum,
        parallel__backend="shard_map",
        parallel__exchange=ConfigDict({"name": "onebit"}),
    )
    state, run = after(plain, 8, 8)
    assert isinstance(run.exchange.exchange, OneBit) and run.stage(0) == run.stage(7)
    dense = tiny.digits(optimizer=momentum, parallel__backend="shard_map")
    expected, _ = after(dense, 8, 8)
    start = run.first_state()
    moved = difference(expected.params, start.params)
    assert 0 < difference(state.params, expected.params) < moved


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["powersgd", "lgreco"])
def test_first_synchronisation_through_factors_is_not_zero(exchange: str) -> None:
    """The first synchronisation has no residuals, but uses the initial factors of the exchange."""
    changes = {"parallel__exchange": ConfigDict({"name": exchange, "rank": 2})}
    before, run = after(config("zero_one_adam", **changes), 8, 6)
    assert run.stage(6).of_optimizer.resets
    state, _ = after(config("zero_one_adam", **changes), 8, 7)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, before.params)
    assert min(jax.tree.leaves(moved)) > 1e-5
    assert all(np.any(q) for q in jax.tree.leaves(state.parts["residual"]["kept"].whole["q"]))


@pytest.mark.long
def test_a_skipped_first_update_leaves_the_exchange_as_it_was() -> None:
    """EF21's average starts with the gradient after the skipped update, not with the skipped gradient."""
    run = prepare(
        tiny.digits(
            guards__max_skipped=2,
            parallel__backend="shard_map",
            parallel__exchange=ConfigDict({"name": "ef21", "momentum": 0.9, "ratio": 1.0}),
        ),
        None,
        jax.devices(),
    )
    step, first = run.make_train_step(), next(data.TrainLoader(run.train_set, 64, 0))
    spoilt = {**first, "image": np.full(first["image"].shape, np.inf, np.float32)}
    fine = {**first, "image": first["image"].astype(np.float32)}
    state, sums = step(run.first_state(), run.shard_batch(spoilt))
    residual = state.parts["residual"]["kept"]
    assert int(state.skipped) == 1 and int(residual.whole["count"]) == 0
    _, later = step(state, run.shard_batch(fine))
    _, without_skip = step(run.first_state(), run.shard_batch(fine))
    np.testing.assert_allclose(later["grad_norm"][0], without_skip["grad_norm"][0], rtol=1e-6)
