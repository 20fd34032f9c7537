"""Runs that decide the batch size from statistics equal runs with a known path of batch sizes.

Runs that decide also resume bit for bit, and compile once. The tests replace the statistics by
functions of the update number, so that the batch sizes are known.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, training
from lamb_tpu.errors import Preempted
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import phases
from lamb_tpu.run.build import Run
from lamb_tpu.run.updating import Updating, make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.run.test_batches import ramp
from tests.run.test_calls import same_end
from tests.test_resume import launched
from tests.test_train import Interrupted, checkpoints, interrupt_at, train_in_segments

Statistics = Callable[[int], dict[str, tuple[float, float]]]


def give(monkeypatch: pytest.MonkeyPatch, statistics: Statistics) -> None:
    """Adds `statistics(number)` to the metrics of update `number` of a run, counted from 1."""

    def make(run: Run, loader: data.TrainLoader, *more: Any) -> Updating:
        update = make_updating(run, loader, *more)

        def measured(state: TrainState, step: int) -> tuple[TrainState, Any]:
            state, sums = update(state, step)
            given = statistics(step + 1).items()
            return state, {**sums, **{name: tuple(map(np.float32, pair)) for name, pair in given}}

        return Updating(measured)

    monkeypatch.setattr(training, "make_updating", make)


def rule(name: str, **fields: Any) -> ConfigDict:
    return ConfigDict({"name": name, "lower": 16, "upper": 128} | fields)


def config(batch_rule: ConfigDict, **changes: Any) -> ConfigDict:
    """Returns a config of 1,184 examples in microbatches of 8; the first batch has 32 examples.

    Batches consist of pairs of microbatches.
    """
    values = {
        "batch_size": 32,
        "accumulation_steps": 4,
        "duration": "1184 examples",
        "checkpoint__every": "128 examples",
        "eval__every": "352 examples",
        "log__every": "96 examples",
        "checkpoint__keep": 50,
        "batch_rule": batch_rule,
    }
    return tiny.digits(**values | changes)


NOISE = rule("noise_scale", decay=0.5, interval=2, scaling="sqrt")


def noise(step: int) -> dict[str, tuple[float, float]]:
    """Returns the metrics of an update, with a trace that rises, falls and is sometimes negative.

    Update 9 is skipped, so its sums are 0.
    """
    trace = [20.0, 35.0, 50.0, 90.0, 70.0, 15.0, 5.0, 10.0, 160.0, 40.0, -5.0][step % 11]
    weight = float(step != 9)
    return {"noise_scale/grad_sq": (weight, weight), "noise_scale/trace": (weight * trace, weight)}


def sizes_by_noise() -> list[int]:
    """Computes, without the package, the batch sizes of the rule `NOISE` for the statistics `noise`."""
    sizes, batch, weight, average = list[int](), 32, 0.0, 0.0
    while sum(sizes) < 1184:
        sizes.append(min(batch, 1184 - sum(sizes)))
        step = len(sizes)
        trace, known = noise(step)["noise_scale/trace"]
        if known:
            weight, average = 0.5 * weight + 0.5, 0.5 * average + 0.5 * trace
        if step % 2 == 0:
            # grad_sq is always 1, so its average equals the weight.
            batch = int(np.ceil(min(max(average / weight, 16), 128) / 16)) * 16
    return sizes


SIZES = sizes_by_noise()
BEFORE = [0, *np.cumsum(SIZES).tolist()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    workdir = tmp_path_factory.mktemp("noise")
    with pytest.MonkeyPatch.context() as patch:
        give(patch, noise)
        train(config(NOISE), workdir, quiet=True)
    yield workdir


@pytest.mark.long
def test_the_batches_are_those_of_the_rule(uninterrupted: pathlib.Path) -> None:
    assert len(set(SIZES)) > 4 and len(SIZES) > 20 and SIZES[-1] not in SIZES[-3:-1]
    position = tiny.restored(config(NOISE), uninterrupted)[1]
    assert position["loader"]["examples"] == 1184
    firsts = [step for step in range(len(SIZES)) if step == 0 or SIZES[step] != SIZES[step - 1]]
    assert position["batches"]["pieces"] == [[step, SIZES[step]] for step in firsts]
    assert position["batches"]["step"] == len(SIZES)
    records = read_records(uninterrupted / "metrics.jsonl", "train")
    assert [record["batch_size"] for record in records] == [SIZES[r["step"] - 1] for r in records]
    assert [record["examples"] for record in records] == [BEFORE[r["step"]] for r in records]
    assert sum(record["updates"] for record in records) == len(SIZES) == records[-1]["step"]


@pytest.mark.long
def test_the_run_equals_that_of_a_known_path(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Parameters, moments and rates are equal bit for bit, and the same updates are saved."""
    firsts = [step for step in range(len(SIZES)) if step == 0 or SIZES[step] != SIZES[step - 1]]
    points = tuple((BEFORE[step], SIZES[step]) for step in firsts)
    values = {key: value for key, value in config(NOISE).items() if key != "batch_rule"}
    known = tiny.change(ramp(points, scaling="sqrt"), values)
    train(known, tmp_path, quiet=True)
    tiny.assert_equal(
        tiny.restored(known, tmp_path)[0], tiny.restored(config(NOISE), uninterrupted)[0]
    )
    for kind in ("train", "eval"):
        actual, expected = (
            [
                (record["step"], record.get("learning_rate"), record["loss"])
                for record in read_records(folder / "metrics.jsonl", kind)
            ]
            for folder in (tmp_path, uninterrupted)
        )
        assert actual == expected
    assert checkpoints(tmp_path) == checkpoints(uninterrupted)


@pytest.mark.long
def test_stopped_after_every_update(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, noise)
    once = config(NOISE, eval__every="1184 examples")
    for step in range(1, len(SIZES)):
        with monkeypatch.context() as patch:
            tiny.preempt_at(patch, 2)
            with pytest.raises(Preempted, match=f"^preempted at update {step}, saved"):
                train(once, tmp_path, quiet=True)
    train(once, tmp_path, quiet=True)
    actual, expected = tiny.restored(once, tmp_path), tiny.restored(config(NOISE), uninterrupted)
    tiny.assert_equal(actual[0], expected[0])
    assert actual[1]["batches"] == expected[1]["batches"]


def test_stopped_at_decisions_and_between_them(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule decides after each even-numbered update."""
    give(monkeypatch, noise)
    # A crash after a save: the next start must repeat the same decisions.
    last = read_records(uninterrupted / "metrics.jsonl", "train")[-1]["step"]
    notices = [(3, 2), (2, 3), (4, 6)]
    train_in_segments(monkeypatch, config(NOISE), tmp_path, notices, fails_at=last)
    same_end(tmp_path, uninterrupted, config(NOISE))


@pytest.mark.long
def test_from_every_checkpoint(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run resumed from any checkpoint gives the same result, even from one just before a decision."""
    give(monkeypatch, noise)
    saved = checkpoints(uninterrupted)
    assert {step % 2 for step in saved[:-1]} == {0, 1}
    for step in saved[:-1]:
        folder = tmp_path / str(step)
        shutil.copytree(uninterrupted, folder)
        for later in saved[saved.index(step) + 1 :]:
            shutil.rmtree(folder / "checkpoints" / str(later))
        train(config(NOISE), folder, quiet=True)
        same_end(folder, uninterrupted, config(NOISE))


@pytest.mark.long
def test_nothing_compiles_after_the_first_update(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = list[int]()

    def similarity(step: int) -> dict[str, tuple[float, float]]:
        if step == 1:
            begun.append(len(caplog.records))
        return {"similarity": (0.5 if step < 8 else 1.0, 1.0)}

    give(monkeypatch, similarity)
    grows = config(
        rule("simigrad", target=0.9, scaling="linear"),
        eval__every="1184 examples",
        checkpoint__every="1184 examples",
    )
    with jax.log_compiles(), caplog.at_level("WARNING"):
        train(grows, tmp_path, quiet=True)
    texts = [record.getMessage() for record in caplog.records]
    assert any("Compiling" in text for text in texts[: begun[0]])
    assert not [text for text in texts[begun[0] :] if "Compiling" in text]
    records = read_records(tmp_path / "metrics.jsonl", "train")
    assert max(record["batch_size"] for record in records) == 128
    assert records[-1]["examples"] == 1184


def test_what_is_printed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    give(monkeypatch, noise)
    train(config(NOISE), tmp_path)
    output = tiny.unbroken(capsys.readouterr().out)
    assert "run: updates of 16 to 128 examples = 4.625 epochs of 256 batch: 32, then " in output
    average = f"{1184 / len(SIZES):.1f}"
    assert f"{len(SIZES)} updates in 0:0" in output
    assert f", of {average} examples on average: " in output


@pytest.mark.long
def test_a_phase_is_complete_after_its_examples(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, noise)
    both = config(
        NOISE,
        duration="96 examples",
        phases=ConfigDict({"1": {"seed": 0}, "2": {"duration": "64 examples"}}),
    )
    with monkeypatch.context() as patch:
        tiny.preempt_at(patch, 3)
        with pytest.raises(Preempted):
            train(both, tmp_path, quiet=True)
    assert [phase.name for phase in phases.due(both, tmp_path)] == ["1", "2"]
    # The second phase stops before its first update, so only the first has records.
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, "train")
        with pytest.raises(Interrupted):
            train(both, tmp_path, quiet=True)
    assert [phase.name for phase in phases.due(both, tmp_path)] == ["2"]


MEASURED = {
    "simigrad": {"target": 0.5},
    "noise_scale": {"decay": 0.5},
    "norm_test": {"eta": 0.3},
    "inner_product_test": {"theta": 0.1},
    "augmented": {"theta": 0.1, "nu": 0.5},
}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jit", pytest.param("shard_map", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MEASURED)
def test_a_rule_turns_on_what_it_needs(
    name: str, backend: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured statistics change the batch size, and a resumed run equals an uninterrupted run."""
    measured = config(
        rule(name, interval=2, lower=32, **MEASURED[name]),
        parallel__backend=backend,
        # A microbatch has 16 examples, two for each of the 8 devices.
        batch_size=64,
        accumulation_steps=4,
        eval__every="1184 examples",
    )
    uninterrupted, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(measured, uninterrupted, quiet=True)
    sizes = [
        record["batch_size"] for record in read_records(uninterrupted / "metrics.jsonl", "train")
    ]
    assert len(set(sizes)) > 1
    for poll in (4, 3):  # between decisions, and right after a decision
        with monkeypatch.context() as patch:
            tiny.preempt_at(patch, poll)
            with pytest.raises(Preempted):
                train(measured, stopped, quiet=True)
    train(measured, stopped, quiet=True)
    actual, expected = (tiny.restored(measured, folder) for folder in (stopped, uninterrupted))
    tiny.assert_equal(actual[0], expected[0])
    assert actual[1]["batches"] == expected[1]["batches"]


def decided(name: str, backend: str) -> ConfigDict:
    """Returns a config with microbatches of 16 examples, which can be split over 1, 2, 4 or 8 devices."""
    fields = {"simigrad": {"target": 0.5}, "noise_scale": {"decay": 0.5}}[name]
    return config(
        rule(name, interval=2, lower=32, scaling="sqrt", **fields),
        batch_size=64,
        eval__every="1184 examples",
        parallel__backend=backend,
    )


# Under shard_map the statistic compares devices, so it depends on their number.
@pytest.mark.long
@pytest.mark.parametrize("backend, devices", [("jit", (1, 4, 8)), ("shard_map", (4,))])
@pytest.mark.parametrize("name", ["simigrad", "noise_scale"])
def test_the_same_batches_on_any_devices_and_processes(
    name: str, backend: str, devices: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "from tests.run import test_decisions\ndef get_config(argument=None):\n"
        f"    return test_decisions.decided({name!r}, {backend!r})\n"
    )
    for number in devices:
        done = tiny.command(
            "lamb_tpu.train",
            f"--config={file}",
            f"--workdir={tmp_path / str(number)}",
            devices=number,
        )
        assert done.returncode == 0, done.stderr
    launched(2, 2, f"--config={file}", f"--workdir={tmp_path / 'processes'}")
    paths = []
    for folder in [*map(str, devices), "processes"]:
        state, position = tiny.restored(decided(name, backend), tmp_path / folder)
        paths.append(position["batches"]["pieces"])
        assert int(state.step) == position["batches"]["step"]
    assert paths == [paths[0]] * len(paths)
    assert len(paths[0]) > 3
