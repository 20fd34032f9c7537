"""Runs whose exchange keeps a residual and has two stages: on any devices, resumed, evaluated."""

import functools
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.describe import describe
from lamb_tpu.run.session import Session
from lamb_tpu.run.updating import make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.desync import Desync
from tests import keeping, tiny
from tests.parallel.exchange import spread
from tests.parallel.nets import BATCH_NORM, LAMB, difference

UPDATES = 4
# What `Spread` keeps back is larger than many gradients, to which its rounding is added.
CLOSE = 1e-4
SPREAD = ConfigDict({"name": spread.NAME, "start": 2})
MOMENTUM = ConfigDict({"name": "tests.parallel.exchange.spread:momentum", "learning_rate": 0.1})


def config(exchange: Any = SPREAD, **changes: Any) -> ConfigDict:
    return tiny.digits(
        **{"parallel__backend": "shard_map", "parallel__exchange": exchange, **changes}
    )


def after(config: ConfigDict, num_devices: int, updates: int = UPDATES) -> tuple[TrainState, Run]:
    """The state after some updates, each by the program of its stage."""
    run = prepare(config, None, jax.devices()[:num_devices])
    loader = data.TrainLoader(run.train_set, config.batch_size, config.seed, run.local_rows())
    update, state = make_updating(run, loader, compiles=False), run.first_state()
    for number in range(updates):
        state, sums = update(state, number)
        jax.block_until_ready(sums)
    return state, run


@functools.cache
def plain(model: str = "mlp", optimizer: str = "lamb") -> TrainState:
    """The state by sums in float32, on one device."""
    changes: dict[str, Any] = {"model": BATCH_NORM} if model == "batch_norm" else {}
    changes |= {"optimizer": MOMENTUM if optimizer == "momentum" else LAMB}
    return after(config(ConfigDict({"name": "float32"}), **changes), 1)[0]


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "eight": (8, {}),
    "hierarchy zero1": (
        8,
        {"mesh__data": 2, "mesh__fsdp": 4, "parallel__optimizer_state": "zero1"},
    ),
}
MORE_PLACES: dict[str, tuple[int, dict[str, Any]]] = {
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


@pytest.mark.parametrize(
    "place", [*PLACES, *(pytest.param(place, marks=pytest.mark.long) for place in MORE_PLACES)]
)
def test_every_place_is_float32_on_one_device(place: str) -> None:
    num_devices, changes = {**PLACES, **MORE_PLACES}[place]
    state, run = after(config(**{"optimizer": LAMB, **changes}), num_devices)
    expected = plain("batch_norm" if place == "batch_norm" else "mlp")
    assert difference(state.params, expected.params) < CLOSE
    kept = state.parts["residual"]["kept"]
    assert np.unique(kept.whole["count"]).tolist() == [UPDATES]
    for leaf in jax.tree.leaves(kept.device):
        rows = leaf.sharding.shard_shape(leaf.shape)[0]
        assert np.abs(leaf).max() > 0 and leaf.shape[0] == num_devices * rows
    assert run.stage(0) == run.stage(1) != run.stage(2) == run.stage(3)
    text = describe(run)
    assert f"exchange: {spread.NAME}, start=2 between" in text and "kept by the exchange: " in text


@pytest.mark.parametrize(
    "place",
    [
        "eight",
        *(
            pytest.param(place, marks=pytest.mark.long)
            for place in ("four", "microbatches", "hierarchy", "changing")
        ),
    ],
)
def test_optimizer_that_sends_momentum_is_the_one_that_sends_gradients(place: str) -> None:
    """Momentum is linear: its sums over devices are those of the gradients."""
    num_devices, changes = {
        **PLACES,
        **MORE_PLACES,
        "hierarchy": (8, {"mesh__data": 2, "mesh__fsdp": 4}),
    }[place]
    state, run = after(config(optimizer=MOMENTUM, **changes), num_devices)
    assert [run.stage(update).of_optimizer for update in range(4)] == [None, None] + [
        "momentum"
    ] * 2
    assert difference(state.params, plain(optimizer="momentum").params) < CLOSE
    # In the warm-up gradients are sent as they are, and nothing is kept.
    counts = state.parts["residual"]["kept"].whole["count"]
    assert np.unique(counts).tolist() == [2]


def test_skipped_update_puts_the_residual_back() -> None:
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


def test_copies_of_whole_leaves_are_compared_and_no_others() -> None:
    state, run = after(config(guards__desync_every="1 steps"), 8, 3)
    check = Desync(run)
    check.saving(1, state)
    residual = state.parts["residual"]
    total = residual["kept"].whole["total"]
    parts = [
        np.array(shard.data) + (number == 5)
        for number, shard in enumerate(total.addressable_shards)
    ]
    other = jax.make_array_from_single_device_arrays(
        total.shape,
        total.sharding,
        [jax.device_put(p, s.device) for p, s in zip(parts, total.addressable_shards)],
    )
    whole = {**residual["kept"].whole, "total": other}
    kept = residual["kept"]._replace(whole=whole)
    with pytest.raises(UserError, match="copies of residual/total are no longer .*device 5"):
        check.saving(2, state.replace(residual={**residual, "kept": kept}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The workdir of a run of 12 updates, of which the last 7 are of the second stage."""
    workdir = tmp_path_factory.mktemp("whole")
    train(twelve(), workdir, quiet=True)
    return workdir


def twelve() -> ConfigDict:
    return config(ConfigDict({"name": spread.NAME, "start": 5}))


def cut(workdir: pathlib.Path, folder: pathlib.Path, last: int) -> pathlib.Path:
    copy = pathlib.Path(shutil.copytree(workdir, folder))
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > last:
            shutil.rmtree(path)
    return copy


@pytest.mark.long
@pytest.mark.parametrize("last", [4, 8])
def test_resumed_is_uninterrupted(whole: pathlib.Path, tmp_path: pathlib.Path, last: int) -> None:
    """Resumed in the first stage, and in the second."""
    resumed = cut(whole, tmp_path / "cut", last)
    train(twelve(), resumed, quiet=True)
    (found, position), (expected, wanted) = (
        tiny.restored(twelve(), folder) for folder in (resumed, whole)
    )
    tiny.assert_equal(found, expected)
    assert position["loader"] == wanted["loader"]
    assert int(found.parts["residual"]["kept"].whole["count"]) == 12


@pytest.mark.long
def test_ended_by_sigterm_in_the_second_stage(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(Preempted):
        tiny.preempt_at(patched, 10)
        train(twelve(), tmp_path, quiet=True)
    train(twelve(), tmp_path, quiet=True)
    tiny.assert_equal(tiny.restored(twelve(), tmp_path)[0], tiny.restored(twelve(), whole)[0])


@pytest.mark.long
def test_resumed_on_fewer_devices_the_sum_stays(
    whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    told: list[str] = []
    resumed = cut(whole, tmp_path / "cut", 8)
    before, _ = tiny.restored(twelve(), resumed)
    run = prepare(twelve(), resumed, jax.devices()[:4])
    with Session(run, lambda step: False, told.append) as session:
        state, _ = session.restore()
    assert int(state.step) == 8
    assert told == [
        "the checkpoint is of 8 devices between which gradients are exchanged, and there are 4 "
        "now: each gets an equal share of the sum that Spread has kept"
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
    """From eight to four devices behind the last change of the program."""
    made, whole = keeping.config(name), tmp_path / "whole"
    train(made, whole, quiet=True)
    resumed = cut(whole, tmp_path / "cut", 36)
    before, _ = tiny.restored(made, resumed)
    run = prepare(made, resumed, jax.devices()[:4])
    told: list[str] = []
    with Session(run, lambda step: False, told.append) as session:
        state, _ = session.restore()
    assert "of 8 devices" in told[0] and "there are 4 now" in told[0]
    old, new = before.parts["residual"]["kept"], state.parts["residual"]["kept"]
    assert jax.tree.leaves(old.device)
    for was, leaf in zip(jax.tree.leaves(old.device), jax.tree.leaves(new.device), strict=True):
        # The vectors of 1 bit are padded to whole bytes of all devices.
        assert leaf.ndim == 1 or leaf.shape == (was.shape[0] // 2, *was.shape[1:])
        was, leaf = was.reshape(8, -1), leaf.reshape(4, -1)
        end = min(leaf.shape[1], was.shape[1])
        np.testing.assert_allclose(np.sum(leaf, 0)[:end], np.sum(was, 0)[:end], atol=1e-5)
    process = tiny.start("tests.killing", "tests.keeping", name, str(resumed), devices=4)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    last, expected = (
        [record["loss"] for record in read_records(folder / "metrics.jsonl", "train")][-2:]
        for folder in (resumed, whole)
    )
    np.testing.assert_allclose(last, expected, rtol=0.1)


@pytest.mark.long
def test_evaluated_on_other_devices(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = evaluate_checkpoint(None, whole)
    done = tiny.command("lamb_tpu.evaluate", f"--workdir={whole}", devices=1)
    assert done.returncode == 0, done.stderr
    assert f"{expected['accuracy']:.4f}"[:5] in done.stdout


@pytest.mark.long
def test_two_processes_are_one(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from tests.test_exchange_runs import twelve\n"
        "def get_config(argument=None):\n    return twelve()\n"
    )
    done = tiny.command(
        "lamb_tpu.launch",
        "local",
        "--processes=2",
        "--devices-per-process=4",
        "--",
        f"--config={recipe}",
        f"--workdir={tmp_path / 'two'}",
    )
    assert done.returncode == 0, done.stderr
    found, _ = tiny.restored(twelve(), tmp_path / "two")
    expected, _ = tiny.restored(twelve(), whole)
    assert difference(found.params, expected.params) < CLOSE
    kept, wanted = (state.parts["residual"]["kept"] for state in (found, expected))
    assert difference(kept.device, wanted.device) < CLOSE
