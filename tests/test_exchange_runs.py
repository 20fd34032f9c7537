"""Tests runs whose exchange has a residual and two stages: devices, resuming, evaluation."""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.describe import describe
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.run.session import Session
from lamb_tpu.run.updating import make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.desync import Desync
from tests import keeping, tiny
from tests.marks import some
from tests.parallel.exchange import spread
from tests.parallel.nets import BATCH_NORM, LAMB, difference

UPDATES = 4
# Large rounding errors: `Spread` adds a residual to gradients, many of which are smaller than it.
CLOSE = 1e-4
SPREAD = ConfigDict({"name": spread.NAME, "start": 2})
MOMENTUM = ConfigDict({"name": "tests.parallel.exchange.spread:momentum", "learning_rate": 0.1})


def config(exchange: Any = SPREAD, **changes: Any) -> ConfigDict:
    return tiny.digits(
        **{"parallel__backend": "shard_map", "parallel__exchange": exchange, **changes}
    )


def after(config: ConfigDict, num_devices: int, updates: int = UPDATES) -> tuple[TrainState, Run]:
    """Returns the state after some updates, each made by the program of its stage."""
    run = prepare(config, None, jax.devices()[:num_devices])
    loader = data.TrainLoader(run.train_set, config.batch_size, config.seed, run.local_rows())
    update, state = make_updating(run, loader, compiles=False), run.first_state()
    for number in range(updates):
        state, sums = update(state, number)
        jax.block_until_ready(sums)
    return state, run


@functools.cache
def plain(model: str = "mlp", optimizer: str = "lamb") -> TrainState:
    """Returns the state after the same updates with float32 sums, on one device."""
    changes: dict[str, Any] = {"model": BATCH_NORM} if model == "batch_norm" else {}
    changes |= {"optimizer": MOMENTUM if optimizer == "momentum" else LAMB}
    return after(config(ConfigDict({"name": "float32"}), **changes), 1)[0]


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "eight": (8, {}),
    "hierarchy zero1": (
        8,
        {"mesh__data": 2, "mesh__fsdp": 4, "parallel__optimizer_state": "zero1"},
    ),
    "four": (4, {}),
    "zero1": (8, {"parallel__optimizer_state": "zero1"}),
    "microbatches": (4, {"accumulation_steps": 2}),
    "fsdp": (
        8,
        {"mesh__data": 2, "mesh__fsdp": 4, "parallel__rules": (("hidden0/kernel", "fsdp"),)},
    ),
    "changing": (8, {"batch_rule": ConfigDict({"name": "ramp", "points": ((0, 64),)})}),
    "batch_norm": (8, {"model": BATCH_NORM}),
    "named": (
        8,
        {"parallel__exchange": ConfigDict({**SPREAD.to_dict(), "full_precision": ("bias",)})},
    ),
}


@pytest.mark.parametrize("setting", some(SETTINGS, ("eight", "hierarchy zero1")))
def test_any_devices_equal_float32_on_one_device(setting: str) -> None:
    num_devices, changes = SETTINGS[setting]
    state, run = after(config(**{"optimizer": LAMB, **changes}), num_devices)
    expected = plain("batch_norm" if setting == "batch_norm" else "mlp")
    assert difference(state.params, expected.params) < CLOSE
    kept = state.parts["residual"]["kept"]
    assert np.unique(kept.whole["count"]).tolist() == [UPDATES]
    for leaf in jax.tree.leaves(kept.device):
        rows = leaf.sharding.shard_shape(leaf.shape)[0]
        assert np.abs(leaf).max() > 0 and leaf.shape[0] == num_devices * rows
    assert run.stage(0) == run.stage(1) != run.stage(2) == run.stage(3)
    text = describe(run)
    assert f"exchange: {spread.NAME}, start=2 between" in text and "exchange residual: " in text


@pytest.mark.parametrize(
    "setting", some(("eight", "four", "microbatches", "hierarchy", "changing"), ("eight",))
)
def test_optimizer_that_sends_momentum_is_the_one_that_sends_gradients(setting: str) -> None:
    """Momentum is linear in the gradients, so devices may sum momentum instead of gradients."""
    hierarchy = {"hierarchy": (8, {"mesh__data": 2, "mesh__fsdp": 4})}
    num_devices, changes = (SETTINGS | hierarchy)[setting]
    state, run = after(config(optimizer=MOMENTUM, **changes), num_devices)
    assert [run.stage(update).of_optimizer for update in range(4)] == [None, None] + [
        "momentum"
    ] * 2
    assert difference(state.params, plain(optimizer="momentum").params) < CLOSE
    # During the warm-up, gradients are sent unchanged, without a residual.
    counts = state.parts["residual"]["kept"].whole["count"]
    assert np.unique(counts).tolist() == [2]


def test_skipped_update_restores_the_residual() -> None:
    run = prepare(config(guards__max_skipped=3), None, jax.devices())
    step = run.make_train_step(5)
    loader = data.TrainLoader(run.train_set, 64, 0, run.local_rows())
    state, _ = step(run.first_state(), run.shard_batch(next(loader)))
    before = jax.tree.map(np.array, state.parts["residual"]["kept"])
    batch = dict(next(loader))
    batch["image"] = batch["image"].astype(np.float32)
    batch["image"][3] = np.nan
    state, sums = step(state, run.shard_batch(batch))
    assert int(state.skipped) == 1 and float(sums["skipped"][0]) == 1
    kept = state.parts["residual"]["kept"]
    tiny.assert_equal(kept.device, before.device)
    tiny.assert_equal(kept.split, before.split)
    tiny.assert_equal(kept.whole["total"], before.whole["total"])


def test_only_copies_of_replicated_leaves_are_compared() -> None:
    state, run = after(config(guards__desync_every="1 steps"), 8, 3)
    check = Desync(run, CurrentRecipe(run.recipe))
    check.saving(1, state)
    residual = state.parts["residual"]
    total = residual["kept"].whole["total"]
    copies = [
        np.array(shard.data) + (number == 5)
        for number, shard in enumerate(total.addressable_shards)
    ]
    other = jax.make_array_from_single_device_arrays(
        total.shape,
        total.sharding,
        [jax.device_put(p, s.device) for p, s in zip(copies, total.addressable_shards)],
    )
    replicated = {**residual["kept"].whole, "total": other}
    kept = residual["kept"]._replace(whole=replicated)
    with pytest.raises(
        UserError, match="copies of residual/total differ between devices: device 5"
    ):
        check.saving(2, state.replace(residual={**residual, "kept": kept}))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The workdir of a run with 5 updates in the first stage and 7 in the second."""
    workdir = tmp_path_factory.mktemp("full")
    train(twelve(), workdir, quiet=True)
    return workdir


def twelve() -> ConfigDict:
    return config(ConfigDict({"name": spread.NAME, "start": 5}))


@pytest.mark.long
@pytest.mark.parametrize("last", [4, 8])
def test_resumed_is_uninterrupted(full: pathlib.Path, tmp_path: pathlib.Path, last: int) -> None:
    """A run that resumes in the first or the second stage equals the uninterrupted run."""
    resumed = tiny.cut(full, tmp_path / "cut", last)
    train(twelve(), resumed, quiet=True)
    actual = tiny.same_state(twelve(), resumed, full)
    assert int(actual.parts["residual"]["kept"].whole["count"]) == 12


@pytest.mark.long
def test_ended_by_sigterm_in_the_second_stage(full: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with tiny.preempted_at(10):
        train(twelve(), tmp_path, quiet=True)
    train(twelve(), tmp_path, quiet=True)
    tiny.same_state(twelve(), tmp_path, full)


@pytest.mark.long
def test_resumed_on_fewer_devices_the_sum_stays(full: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output: list[str] = []
    resumed = tiny.cut(full, tmp_path / "cut", 8)
    before, _ = tiny.restored(twelve(), resumed)
    run = prepare(twelve(), resumed, jax.devices()[:4])
    with Session(run, CurrentRecipe(run.recipe), lambda step: False, output.append) as session:
        state, _ = session.restore()
    assert int(state.step) == 8
    assert output == [
        "the checkpoint has a residual of Spread for 8 devices, and this run exchanges gradients "
        "between 4: each device gets an equal share of the residual's sum"
    ]
    old, new = before.parts["residual"]["kept"], state.parts["residual"]["kept"]
    for was, leaf in zip(jax.tree.leaves(old.device), jax.tree.leaves(new.device), strict=True):
        was, leaf = was.reshape(8, -1), leaf.reshape(4, -1)
        np.testing.assert_allclose(np.sum(leaf, 0), np.sum(was, 0), atol=1e-6)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    np.testing.assert_array_equal(np.ravel(old.split)[:size], np.ravel(new.split)[:size])
    loader = data.TrainLoader(run.train_set, 64, 0, run.local_rows())
    state, sums = make_updating(run, loader, compiles=False)(state, 8)
    assert np.isfinite(sums["loss"][0]) and int(state.parts["residual"]["kept"].whole["count"]) == 9


@pytest.mark.long
@pytest.mark.parametrize("name", keeping.METHODS)
def test_every_method_goes_on_with_half_the_devices(name: str, tmp_path: pathlib.Path) -> None:
    """Resumes on four of eight devices, after the last update at which the compiled program changes."""
    made, full = keeping.config(name), tmp_path / "full"
    train(made, full, quiet=True)
    resumed = tiny.cut(full, tmp_path / "cut", 36)
    before, _ = tiny.restored(made, resumed)
    run = prepare(made, resumed, jax.devices()[:4])
    output: list[str] = []
    with Session(run, CurrentRecipe(run.recipe), lambda step: False, output.append) as session:
        state, _ = session.restore()
    assert "for 8 devices" in output[0] and "gradients between 4:" in output[0]
    old, new = before.parts["residual"]["kept"], state.parts["residual"]["kept"]
    assert jax.tree.leaves(old.device)
    for was, leaf in zip(jax.tree.leaves(old.device), jax.tree.leaves(new.device), strict=True):
        # The vectors of 1-bit values are padded to full bytes on each device.
        assert leaf.ndim == 1 or leaf.shape == (was.shape[0] // 2, *was.shape[1:])
        was, leaf = was.reshape(8, -1), leaf.reshape(4, -1)
        end = min(leaf.shape[1], was.shape[1])
        np.testing.assert_allclose(np.sum(leaf, 0)[:end], np.sum(was, 0)[:end], atol=1e-5)
    process = tiny.start("tests.killing", "tests.keeping", name, str(resumed), devices=4)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    last, expected = (
        [record["loss"] for record in read_records(folder / "metrics.jsonl", "train")][-2:]
        for folder in (resumed, full)
    )
    np.testing.assert_allclose(last, expected, rtol=0.1)


@pytest.mark.long
def test_evaluated_on_other_devices(full: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = evaluate_checkpoint(None, full)
    done = tiny.succeed("lamb_tpu.evaluate", f"--workdir={full}", devices=1)
    assert f"{expected['accuracy']:.4f}"[:5] in done.stdout


@pytest.mark.long
def test_two_processes_are_one(full: pathlib.Path, tmp_path: pathlib.Path) -> None:
    recipe = tiny.recipe(tmp_path, "twelve()", "tests.test_exchange_runs.twelve")
    tiny.launched(2, 4, recipe, f"--workdir={tmp_path / 'two'}")
    actual, _ = tiny.restored(twelve(), tmp_path / "two")
    expected, _ = tiny.restored(twelve(), full)
    assert difference(actual.params, expected.params) < CLOSE
    kept, wanted = (state.parts["residual"]["kept"] for state in (actual, expected))
    assert difference(kept.device, wanted.device) < CLOSE
