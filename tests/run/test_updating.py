"""Runs whose batch changes: by hand, over kills, on any devices, without compiling again."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.errors import Preempted
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, make_optimizer, prepare
from lamb_tpu.run.updating import Microbatches, make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, difference
from tests.run.test_batches import SIZES, ramp
from tests.test_train import Interrupted, interrupt_at, without_seconds

BEFORE = np.cumsum(SIZES) - SIZES
RATES = np.where(BEFORE < 256, 0.02 * BEFORE / 256, 0.02 * (768 - BEFORE) / 512) * np.sqrt(
    np.array(SIZES) / 64
)


def loader_of(run: Run) -> data.TrainLoader:
    return data.TrainLoader(run.train_set, run.config.batch_size, run.config.seed, run.local_rows())


def by_hand(model: Any, updates: int) -> TrainState:
    """The updates of `ramp`, each by a step of its own size at a rate worked out by hand."""
    run = prepare(ramp(model=model), None)
    state = run.first_state()
    rates = jnp.asarray(RATES, jnp.float32)
    steps: dict[int, tuple[Run, Any]] = {}
    for number in range(updates):
        size = SIZES[number]
        if size not in steps:
            sized = prepare(
                tiny.digits(batch_size=size, accumulation_steps=size // 16, model=model), None
            )
            recipe = dataclasses.replace(sized.recipe, learning_rate=lambda count: rates[count])
            tx = make_optimizer(sized.config, recipe, state.params, sized.layout)
            sized = dataclasses.replace(sized, tx=tx)
            steps[size] = sized, sized.make_train_step()
        sized, step = steps[size]
        loader = loader_of(sized)
        loader.examples = int(BEFORE[number])
        state, _ = step(state, sized.shard_batch(next(loader)))
    return state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of 13 updates of 16, 32, 128 and at last 64 examples."""
    workdir = tmp_path_factory.mktemp("ramp")
    train(config(), workdir, quiet=True)
    return workdir


def config(**changes: Any) -> Any:
    values = {"scaling": "sqrt", "log__every": "16 examples", "eval__every": "6 steps"}
    return ramp(**values | changes)


@pytest.mark.long
def test_a_run_is_that_of_steps_of_one_size(whole: pathlib.Path) -> None:
    found, position = tiny.restored(config(), whole)
    expected = by_hand(config().model, len(SIZES))
    assert int(found.step) == 13 and position["loader"]["examples"] == 768
    assert position["batches"]["pieces"] == [[0, 16], [4, 32], [8, 128], [12, 64]]
    assert difference(found.params, expected.params) < 2e-6
    assert difference(found.opt_state, expected.opt_state) < 2e-6


def test_records_have_batch_and_examples(whole: pathlib.Path) -> None:
    records = read_records(whole / "metrics.jsonl", "train")
    assert [record["batch_size"] for record in records] == SIZES
    assert [record["examples"] for record in records] == list(np.cumsum(SIZES))
    assert [record["epoch"] for record in records] == list(np.cumsum(SIZES) / 256)
    np.testing.assert_allclose([r["learning_rate"] for r in records], RATES, rtol=1e-6)
    # Evaluations after every 384 examples, and saves after every 256.
    assert [r["step"] for r in read_records(whole / "metrics.jsonl", "eval")] == [10, 13]
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {"9", "11", "13"}


@pytest.mark.long
def test_resumed_before_at_and_after_a_change(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for poll, step in [(4, 3), (2, 4), (2, 5), (4, 8)]:  # changes at 4, 8 and 12
        with monkeypatch.context() as patch:
            tiny.preempt_at(patch, poll)
            with pytest.raises(Preempted, match=f"^preempted at update {step}, saved"):
                train(config(), tmp_path, quiet=True)
    # Back to the checkpoint of update 11, and over the last change.
    interrupt_at(monkeypatch, 13, "train")
    with pytest.raises(Interrupted):
        train(config(), tmp_path, quiet=True)
    train(config(), tmp_path, quiet=True)
    (found, position), (expected, other) = (
        tiny.restored(config(), folder) for folder in (tmp_path, whole)
    )
    tiny.assert_equal(found, expected)
    for key in ("loader", "batches"):
        assert position[key] == other[key]
    assert without_seconds(tmp_path) == without_seconds(whole)


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "shard_map zero1": (
        8,
        {"parallel__backend": "shard_map", "parallel__optimizer_state": "zero1"},
    ),
}
NETS = {"batch_norm": BATCH_NORM, "dropout": DROPOUT}


@pytest.mark.long
@pytest.mark.parametrize("net", some(NETS, ("dropout",)))
def test_devices_agree_and_nothing_compiles_again(
    net: str, caplog: pytest.LogCaptureFixture
) -> None:
    states = []
    for devices, changes in PLACES.values():
        run = prepare(config(model=NETS[net], **changes), None, jax.devices()[:devices])
        loader = loader_of(run)
        update, state = make_updating(run, loader), run.first_state()
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("WARNING"):
            for step in range(9):
                state, _ = update(state, step)
            jax.block_until_ready(state)
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
        assert loader.examples == 320
        states.append(state)
    assert difference(states[1], states[0]) < 2e-6
    expected = by_hand(NETS[net], 9)
    assert difference(states[0].params, expected.params) < 2e-6


def test_a_constant_batch_compiles_one_step() -> None:
    run = prepare(tiny.digits(), None)
    loader = loader_of(run)
    state, _ = make_updating(run, loader, compiles=False)(run.first_state(), 0)
    assert int(state.step) == 1 and loader.examples == 64


def test_bytes_that_a_device_sends(tmp_path: pathlib.Path) -> None:
    def updating(devices: int, **changes: Any) -> tuple[Any, Run]:
        run = prepare(tiny.digits(**changes), None, jax.devices()[:devices])
        return make_updating(run, loader_of(run), compiles=False), run

    named = {"parallel__backend": "shard_map"}
    assert updating(8)[0].sent_bytes() is None
    assert updating(1, **named)[0].sent_bytes() is None
    found, run = updating(8, **named)
    values = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    # An all-reduce sends 7/8 of the gradient twice; the rest are the metrics.
    assert 0 <= found.sent_bytes() - 2 * 7 / 8 * 4 * values < 100
    train(tiny.digits(**named), tmp_path, quiet=True)
    assert {r["sent_bytes"] for r in read_records(tmp_path / "metrics.jsonl", "train")} == {
        found.sent_bytes()
    }


def test_microbatches_are_read_in_order_and_placed_when_asked_for() -> None:
    read, placed = iter("abcdefgh"), list[str]()

    def place(batch: Any) -> Any:
        placed.append(batch)
        return batch.upper()

    batches = Microbatches(3, lambda: next(read), place)
    assert len(batches) == 3 and not placed
    for index, batch in enumerate(batches):
        assert batch == "ABC"[index] and placed == list("abc")[: index + 1]
    assert list(batches) == ["A", "B", "C"] and batches[0] == "A" and placed == list("abcabca")
    assert next(read) == "d"
