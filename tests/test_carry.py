"""Tests runs with a recurrent state for each row of a batch: devices, microbatches, resuming, evaluation."""

import functools
import pathlib
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.describe import describe
from lamb_tpu.run.evaluator import make_evaluator
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny.text(tmp_path_factory.mktemp("text"))


def by_example(state: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a state, with the rows of the carry in the order of their examples."""
    actual = tiny.arrays({"params": state.params, "step": state.step})
    carry = jax.device_get(state.parts["carry"])
    return actual | {"carry": carry["value"][np.argsort(carry["example"])]}


def trained(config: ConfigDict, num_devices: int, steps: int = 12) -> tuple[Any, Run]:
    run = prepare(config, None, jax.devices()[:num_devices])
    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch()).compile()
    state = run.first_state()
    loader = data.TrainLoader(run.train_set, config.batch_size, config.seed, run.local_rows())
    for _ in range(steps):
        state, sums = step(state, run.shard_batch(next(loader)))
        jax.block_until_ready(sums)
    return state, run


@functools.cache
def on_one_device(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return by_example(trained(tiny.words(folder), 1)[0])


def close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=3e-6, err_msg=name)


SETTINGS = [
    (8, {}),
    (4, {"accumulation_steps": 2, "parallel__backend": "shard_map"}),
    (8, {"parallel__backend": "shard_map", "parallel__optimizer_state": "zero1"}),
    (4, {"accumulation_steps": 2}),
    (1, {"accumulation_steps": 4}),
    (4, {"parallel__optimizer_state": "zero1", "mesh__fsdp": 2, "accumulation_steps": 2}),
]


@pytest.mark.long
@pytest.mark.parametrize("num_devices, changes", SETTINGS)
def test_any_devices_equal_one_device(
    folder: pathlib.Path, num_devices: int, changes: dict[str, Any]
) -> None:
    state, run = trained(tiny.words(folder, **changes), num_devices)
    close(by_example(state), on_one_device(folder))
    assert np.abs(on_one_device(folder)["carry"]).max() > 0.01
    assert "carry: 1.031 KiB, " in describe(run)
    value = state.parts["carry"]["value"]
    assert value.sharding.shard_shape(value.shape) == (8 // num_devices, 2, 2, 8)


@pytest.mark.long
def test_a_row_reads_its_stream_from_the_start_in_every_epoch(folder: pathlib.Path) -> None:
    """With a learning rate of 0, the carry equals the carry after reading the entire stream at once."""
    config = tiny.words(
        folder, optimizer__learning_rate=0.0, model__dropout_rate=0.0, accumulation_steps=2
    )
    run = prepare(config, None, jax.devices()[:2])
    windows = len(run.train_set) // 8
    assert windows == 11

    def read(params: Any, words: jax.Array) -> jax.Array:
        outputs, _ = run.task.model.apply({"params": params}, {"inputs": words}, train=False)
        return outputs["carry"]

    for updates, first in ((5, 0), (12, windows)):
        state, _ = trained(config, 2, updates)
        batches = [
            run.train_set.gather(8 * window + np.arange(8)) for window in range(updates - first)
        ]
        words = np.concatenate([batch["inputs"] for batch in batches], 1)
        np.testing.assert_allclose(
            by_example(state)["carry"], jax.jit(read)(state.params, jnp.asarray(words)), atol=1e-6
        )


@pytest.mark.long
def test_a_skipped_update_puts_the_carry_back(folder: pathlib.Path) -> None:
    config = tiny.words(folder, guards__max_skipped=3)
    run = prepare(config, None, jax.devices()[:2])
    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch()).compile()
    state = run.first_state()
    loader = data.TrainLoader(run.train_set, 8, config.seed, run.local_rows())
    state, _ = step(state, run.shard_batch(next(loader)))
    before = jax.device_get(state.parts["carry"])
    # Copy, because the step donates its state.
    kernel = jax.tree.map(jnp.copy, state.params["output"]["kernel"])
    spoilt = {**state.params, "output": {**state.params["output"], "kernel": jnp.nan * kernel}}
    state, sums = step(state.replace(params=spoilt), run.shard_batch(next(loader)))
    assert int(state.skipped) == 1 and float(sums["skipped"][0]) == 1
    tiny.assert_equal(state.parts["carry"], before)
    assert np.abs(before["value"]).max() > 0


@pytest.mark.parametrize(
    "devices, changes",
    [pytest.param(8, {}, marks=pytest.mark.long), (2, {"accumulation_steps": 2})],
)
def test_resumed(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    changes: dict[str, Any],
) -> None:
    """A resumed run equals the full run: bit for bit on the same devices, up to rounding on other devices."""
    config, every = tiny.words(folder, **changes), jax.devices()

    def run_on(count: int, workdir: pathlib.Path) -> Any:
        monkeypatch.setattr(jax, "devices", lambda *_: every[:count])
        train(config, workdir, quiet=True)
        actual = tiny.restored(config, workdir)[0]
        monkeypatch.undo()
        return actual

    full = run_on(devices, tmp_path / "full")
    for count in (devices, 4):
        cut = tiny.cut(tmp_path / "full", tmp_path / f"cut{count}", 4)
        actual = run_on(count, cut)
        if count == devices:
            tiny.assert_equal(actual, full)
        close(by_example(actual), by_example(full))
        records = [
            read_records(path / "metrics.jsonl", "eval") for path in (cut, tmp_path / "full")
        ]
        assert [r["step"] for r in records[0]] == [6, 12]
        for ours, theirs in zip(*records, strict=True):
            assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-6)


@pytest.mark.long
def test_perplexity_is_one_number(folder: pathlib.Path) -> None:
    actual = {}
    for count in (1, 4, 8):
        for batch_size in (1, 7, 20):
            config = tiny.words(folder, eval__batch_size=batch_size, batch_size=20)
            run = prepare(config, None, jax.devices()[:count], training=False)
            actual[count, batch_size] = make_evaluator(run)(run.first_state())
    expected = actual[1, 1]
    assert expected["perplexity"] == pytest.approx(np.exp(expected["loss"]))
    assert 15 < expected["perplexity"] < 60
    for metrics in actual.values():
        assert metrics == pytest.approx(expected, rel=1e-6)
    # With fewer streams, more words are predicted with the text before them.
    config = tiny.words(folder, data__options={"steps": 8, "eval_streams": 1})
    run = prepare(config, None, jax.devices()[:1])
    full = make_evaluator(run)(run.first_state())
    assert full["perplexity"] != expected["perplexity"]


@pytest.mark.long
def test_killed(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    words = f"tiny.words({str(folder)!r}, duration='300 steps', log__every='1 steps')"
    recipe = tiny.recipe(tmp_path, words)
    full, killed = tmp_path / "full", tmp_path / "killed"
    tiny.succeed("lamb_tpu.train", recipe, f"--workdir={full}", devices=2)
    process = tiny.start("lamb_tpu.train", recipe, f"--workdir={killed}", devices=2)
    metrics, deadline = killed / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 50):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    done = tiny.succeed("lamb_tpu.train", recipe, f"--workdir={killed}", devices=2)
    assert "resumed from the checkpoint of update" in done.stdout
    # The runs had two devices; on the eight of this process, only the sharding differs.
    config = tiny.words(folder, duration="300 steps", log__every="1 steps")
    tiny.same_state(config, killed, full)


@pytest.mark.long
def test_two_processes(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    recipe = tiny.recipe(tmp_path, f"tiny.words({str(folder)!r}, accumulation_steps=2)")
    workdir = tmp_path / "two"
    tiny.launched(2, 2, recipe, f"--workdir={workdir}")
    run = prepare(tiny.words(folder, accumulation_steps=2), workdir, jax.devices()[:2])
    with Checkpoints(run.folder.checkpoints, 1, writes=False) as checkpoints:
        state, _ = checkpoints.restore(12, run.abstract_state)
    assert state.parts["carry"]["example"].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    close(by_example(state), on_one_device(folder))
