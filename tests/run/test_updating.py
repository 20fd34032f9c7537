"""Runs with a changing batch size: they equal separate steps, resume, and compile once."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.updating import Microbatches, make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, difference
from tests.run.test_batches import SIZES, ramp
from tests.run.test_calls import same_end
from tests.test_train import train_in_segments

BEFORE = np.cumsum(SIZES) - SIZES
RATES = np.where(BEFORE < 256, 0.02 * BEFORE / 256, 0.02 * (768 - BEFORE) / 512) * np.sqrt(
    np.array(SIZES) / 64
)


def loader_of(run: Run) -> data.TrainLoader:
    return data.TrainLoader(run.train_set, run.spec.batch_size, run.spec.seed, run.local_rows())


def by_hand(model: Any, updates: int) -> TrainState:
    """Makes the updates of `ramp` with a separate step for each batch size and the rates `RATES`."""
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
            tx = sized.make_optimizer(recipe)
            sized = dataclasses.replace(sized, tx=tx)
            steps[size] = sized, sized.make_train_step()
        sized, step = steps[size]
        loader = loader_of(sized)
        loader.examples = int(BEFORE[number])
        state, _ = step(state, sized.shard_batch(next(loader)))
    return state


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns the workdir of a run of 13 updates, with batches of 16, 32, 128 and finally 64 examples."""
    workdir = tmp_path_factory.mktemp("ramp")
    train(config(), workdir, quiet=True)
    return workdir


def config(**changes: Any) -> Any:
    values = {"scaling": "sqrt", "log__every": "16 examples", "eval__every": "6 steps"}
    return ramp(**values | changes)


@pytest.mark.long
def test_a_run_equals_separate_steps_of_each_size(uninterrupted: pathlib.Path) -> None:
    actual, position = tiny.restored(config(), uninterrupted)
    expected = by_hand(config().model, len(SIZES))
    assert int(actual.step) == 13 and position["loader"]["examples"] == 768
    assert position["batches"]["pieces"] == [[0, 16], [4, 32], [8, 128], [12, 64]]
    assert difference(actual.params, expected.params) < 2e-6
    assert difference(actual.opt_state, expected.opt_state) < 2e-6


def test_records_have_batch_and_examples(uninterrupted: pathlib.Path) -> None:
    records = read_records(uninterrupted / "metrics.jsonl", "train")
    assert [record["batch_size"] for record in records] == SIZES
    assert [record["examples"] for record in records] == list(np.cumsum(SIZES))
    assert [record["epoch"] for record in records] == list(np.cumsum(SIZES) / 256)
    np.testing.assert_allclose([r["learning_rate"] for r in records], RATES, rtol=1e-6)
    # Evaluations after every 384 examples, and saves after every 256.
    assert [r["step"] for r in read_records(uninterrupted / "metrics.jsonl", "eval")] == [10, 13]
    assert {path.name for path in (uninterrupted / "checkpoints").iterdir()} == {"9", "11", "13"}


@pytest.mark.long
def test_resumed_before_at_and_after_a_change(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = [(4, 3), (2, 4), (2, 5), (4, 8)]  # the batch changes at 4, 8 and 12
    # The last start resumes from the checkpoint of update 11, before the last change.
    train_in_segments(monkeypatch, config(), tmp_path, notices, fails_at=13)
    same_end(tmp_path, uninterrupted, config())


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


def test_bytes_that_a_device_sends(tmp_path: pathlib.Path) -> None:
    def updating(devices: int, **changes: Any) -> tuple[Any, Run]:
        run = prepare(tiny.digits(**changes), None, jax.devices()[:devices])
        return make_updating(run, loader_of(run), compiles=False), run

    named = {"parallel__backend": "shard_map"}
    assert updating(8)[0].sent_bytes() is None
    assert updating(1, **named)[0].sent_bytes() is None
    actual, run = updating(8, **named)
    values = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    # An all-reduce sends 7/8 of the gradient twice; the remaining bytes are metrics.
    assert 0 <= actual.sent_bytes() - 2 * 7 / 8 * 4 * values < 100
    train(tiny.digits(**named), tmp_path, quiet=True)
    assert {r["sent_bytes"] for r in read_records(tmp_path / "metrics.jsonl", "train")} == {
        actual.sent_bytes()
    }


def sent_by(run: Run, updates: int) -> list[Any]:
    """Returns the bytes that a device sends in each of the first updates."""
    update, state = make_updating(run, loader_of(run), compiles=False), run.first_state()
    sent: list[Any] = []
    for step in range(updates):
        state, _ = update(state, step)
        sent.append(update.sent_bytes())
    return sent


def test_bytes_that_a_device_sends_with_batches_that_change() -> None:
    # BatchNorm over all devices communicates in each microbatch; the gradient is sent once per update.
    model = {**BATCH_NORM, "group_size": None}
    run = prepare(ramp(parallel__backend="shard_map", model=model), None)
    sent = sent_by(run, 5)
    assert SIZES[:5] == [16, 16, 16, 16, 32] and len(set(sent[:4])) == 1
    each = sent[4] - sent[0]
    values = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    assert each > 0 and 0 <= sent[0] - each - 2 * 7 / 8 * 4 * values < 200


def test_bytes_that_a_device_sends_for_statistics_of_a_constant_batch() -> None:
    config = tiny.digits(
        parallel__backend="shard_map",
        accumulation_steps=2,
        statistics__noise_scale=True,
        statistics__per_example=8,
        statistics__interval=2,
    )
    run = prepare(config, None)
    sent = sent_by(run, 4)
    values = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    # A device sends the gradient and a few numbers for the noise scale, and in every second update
    # also per-example statistics.
    assert sent[0] != sent[1] and sent[:2] == sent[2:]
    assert 0 <= min(sent) - 2 * 7 / 8 * 4 * values < 200


@pytest.mark.long
@pytest.mark.parametrize("batch_rule", [{}, {"name": "ramp", "points": ((0, 64),)}])
def test_gradients_one_by_one_after_the_warm_up_of_a_1_bit_optimizer(batch_rule: Any) -> None:
    optimizer = {"name": "onebit_lamb", "learning_rate": 0.02, "freeze_step": 1}
    config = tiny.digits(
        optimizer=ConfigDict(optimizer),
        batch_rule=ConfigDict(batch_rule),
        statistics__per_example=8,
        statistics__interval=2,
    )
    run = prepare(config, None, jax.devices()[:1])
    update, state = make_updating(run, loader_of(run), compiles=False), run.first_state()
    weights = []
    for step in range(2):
        state, sums = update(state, step)
        weights.append(float(sums["variance"][1]))
    assert weights == [0, 1] and run.stage(1).of_optimizer is not None
    assert float(sums["variance"][0]) > 0


def test_microbatches_are_read_in_order_and_placed_when_asked_for() -> None:
    read, placed = iter("abcdefgh"), list[str]()

    def send(batch: Any) -> Any:
        placed.append(batch)
        return batch.upper()

    batches = Microbatches(3, lambda: next(read), send)
    assert len(batches) == 3 and not placed
    for index, batch in enumerate(batches):
        assert batch == "ABC"[index] and placed == list("abc")[: index + 1]
    assert list(batches) == ["A", "B", "C"] and batches[0] == "A" and placed == list("abcabca")
    assert next(read) == "d"
