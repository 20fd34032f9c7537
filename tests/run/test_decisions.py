"""Runs whose batch follows statistics: against known paths, over kills, without compiling again.

The statistics are given here: a function of the update, so that the batches are known by hand.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu import train as train_lib
from lamb_tpu.errors import Preempted
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import phases
from lamb_tpu.run.build import Run
from lamb_tpu.run.updating import Updating, make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.run.test_batches import ramp
from tests.test_resume import launched
from tests.test_train import Interrupted, interrupt_at, without_seconds

Statistics = Callable[[int], dict[str, tuple[float, float]]]


def give(monkeypatch: pytest.MonkeyPatch, statistics: Statistics) -> None:
    """Every update of a run has these metrics too, by its number, from 1."""

    def make(run: Run, loader: data.TrainLoader, *more: Any) -> Updating:
        update = make_updating(run, loader, *more)

        def measured(state: TrainState, step: int) -> tuple[TrainState, Any]:
            state, sums = update(state, step)
            given = statistics(step + 1).items()
            return state, {**sums, **{name: tuple(map(np.float32, pair)) for name, pair in given}}

        return Updating(measured)

    monkeypatch.setattr(train_lib, "make_updating", make)


def rule(name: str, **fields: Any) -> ConfigDict:
    return ConfigDict({"name": name, "lower": 16, "upper": 128} | fields)


def config(batch_rule: ConfigDict, **changes: Any) -> ConfigDict:
    """1184 examples, first in batches of 32, in quanta of 16: microbatches of 8 in pairs."""
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
    """Noise that rises, falls and is not known; the update 9 was skipped, whose sums are 0."""
    trace = [20.0, 35.0, 50.0, 90.0, 70.0, 15.0, 5.0, 10.0, 160.0, 40.0, -5.0][step % 11]
    weight = float(step != 9)
    return {"noise_scale/grad_sq": (weight, weight), "noise_scale/trace": (weight * trace, weight)}


def sizes_by_noise() -> list[int]:
    """The batches of `NOISE` by `noise`, worked out here."""
    sizes, batch, weight, average = list[int](), 32, 0.0, 0.0
    while sum(sizes) < 1184:
        sizes.append(min(batch, 1184 - sum(sizes)))
        step = len(sizes)
        trace, known = noise(step)["noise_scale/trace"]
        if known:
            weight, average = 0.5 * weight + 0.5, 0.5 * average + 0.5 * trace
        if step % 2 == 0:
            # grad_sq is always 1, so its average is the weight.
            batch = int(np.ceil(min(max(average / weight, 16), 128) / 16)) * 16
    return sizes


SIZES = sizes_by_noise()
BEFORE = [0, *np.cumsum(SIZES).tolist()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    workdir = tmp_path_factory.mktemp("noise")
    with pytest.MonkeyPatch.context() as patch:
        give(patch, noise)
        train(config(NOISE), workdir, quiet=True)
    yield workdir


def compare(folder: pathlib.Path, whole: pathlib.Path) -> None:
    """Asserts that bits, batches, averages and records are the same."""
    (found, position), (expected, other) = (
        tiny.restored(config(NOISE), each) for each in (folder, whole)
    )
    tiny.assert_equal(found, expected)
    assert position["loader"] == other["loader"] and position["batches"] == other["batches"]
    assert without_seconds(folder) == without_seconds(whole)


@pytest.mark.long
def test_the_batches_are_those_of_the_rule(whole: pathlib.Path) -> None:
    assert len(set(SIZES)) > 4 and len(SIZES) > 20 and SIZES[-1] not in SIZES[-3:-1]
    position = tiny.restored(config(NOISE), whole)[1]
    assert position["loader"]["examples"] == 1184
    firsts = [step for step in range(len(SIZES)) if step == 0 or SIZES[step] != SIZES[step - 1]]
    assert position["batches"]["pieces"] == [[step, SIZES[step]] for step in firsts]
    assert position["batches"]["step"] == len(SIZES)
    records = read_records(whole / "metrics.jsonl", "train")
    assert [record["batch_size"] for record in records] == [SIZES[r["step"] - 1] for r in records]
    assert [record["examples"] for record in records] == [BEFORE[r["step"]] for r in records]
    assert sum(record["updates"] for record in records) == len(SIZES) == records[-1]["step"]


@pytest.mark.long
def test_the_run_is_that_of_the_same_path_known_before(
    whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """To the bit: parameters, moments, rates and the updates that are evaluated and saved."""
    firsts = [step for step in range(len(SIZES)) if step == 0 or SIZES[step] != SIZES[step - 1]]
    points = tuple((BEFORE[step], SIZES[step]) for step in firsts)
    values = {key: value for key, value in config(NOISE).items() if key != "batch_rule"}
    known = tiny.change(ramp(points, scaling="sqrt"), values)
    train(known, tmp_path, quiet=True)
    tiny.assert_equal(tiny.restored(known, tmp_path)[0], tiny.restored(config(NOISE), whole)[0])
    for kind in ("train", "eval"):
        found, expected = (
            [
                (record["step"], record.get("learning_rate"), record["loss"])
                for record in read_records(folder / "metrics.jsonl", kind)
            ]
            for folder in (tmp_path, whole)
        )
        assert found == expected
    names = [
        sorted(path.name for path in (each / "checkpoints").iterdir()) for each in (tmp_path, whole)
    ]
    assert names[0] == names[1]


@pytest.mark.long
def test_stopped_after_every_update(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, noise)
    once = config(NOISE, eval__every="1184 examples")
    for step in range(1, len(SIZES)):
        with monkeypatch.context() as patch:
            tiny.preempt_at(patch, 2)
            with pytest.raises(Preempted, match=f"^preempted at update {step}, saved"):
                train(once, tmp_path, quiet=True)
    train(once, tmp_path, quiet=True)
    found, expected = tiny.restored(once, tmp_path), tiny.restored(config(NOISE), whole)
    tiny.assert_equal(found[0], expected[0])
    assert found[1]["batches"] == expected[1]["batches"]


def test_stopped_at_decisions_and_between_them(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions follow the updates of even number."""
    give(monkeypatch, noise)
    for poll, step in [(3, 2), (2, 3), (4, 6)]:
        with monkeypatch.context() as patch:
            tiny.preempt_at(patch, poll)
            with pytest.raises(Preempted, match=f"^preempted at update {step}, saved"):
                train(config(NOISE), tmp_path, quiet=True)
    # Killed behind a save, so that the same decisions are taken again.
    last = read_records(whole / "metrics.jsonl", "train")[-1]["step"]
    interrupt_at(monkeypatch, last, "train")
    with pytest.raises(Interrupted):
        train(config(NOISE), tmp_path, quiet=True)
    train(config(NOISE), tmp_path, quiet=True)
    compare(tmp_path, whole)


@pytest.mark.long
def test_from_every_checkpoint(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint leads to the same end, also one whose update is followed by a decision."""
    give(monkeypatch, noise)
    saved = sorted(int(path.name) for path in (whole / "checkpoints").iterdir())
    assert {step % 2 for step in saved[:-1]} == {0, 1}
    for step in saved[:-1]:
        folder = tmp_path / str(step)
        shutil.copytree(whole, folder)
        for later in saved[saved.index(step) + 1 :]:
            shutil.rmtree(folder / "checkpoints" / str(later))
        train(config(NOISE), folder, quiet=True)
        compare(folder, whole)


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
    assert max(record["batch_size"] for record in records) == 128  # from 32, and down again
    assert records[-1]["examples"] == 1184


def test_what_is_printed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    give(monkeypatch, noise)
    train(config(NOISE), tmp_path)
    told = tiny.unbroken(capsys.readouterr().out)
    assert "run: updates of 16 to 128 examples = 4.625 epochs of 256 batch: 32, then " in told
    average = f"{1184 / len(SIZES):.1f}"
    assert f"{len(SIZES)} updates in 0:0" in told
    assert f", of {average} examples on average: " in told


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
    # The second one stops before its first update, so only the first one's records tell.
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
    """The batch changes by what the run measures, and a run that was stopped has the same bits."""
    measured = config(
        rule(name, interval=2, lower=32, **MEASURED[name]),
        parallel__backend=backend,
        # A microbatch is 16 examples, two for each of 8 devices.
        batch_size=64,
        accumulation_steps=4,
        eval__every="1184 examples",
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(measured, whole, quiet=True)
    sizes = [record["batch_size"] for record in read_records(whole / "metrics.jsonl", "train")]
    assert len(set(sizes)) > 1
    for poll in (4, 3):  # between decisions, and behind one
        with monkeypatch.context() as patch:
            tiny.preempt_at(patch, poll)
            with pytest.raises(Preempted):
                train(measured, stopped, quiet=True)
    train(measured, stopped, quiet=True)
    found, expected = (tiny.restored(measured, folder) for folder in (stopped, whole))
    tiny.assert_equal(found[0], expected[0])
    assert found[1]["batches"] == expected[1]["batches"]


def decided(name: str, backend: str) -> ConfigDict:
    """20 updates and more; a microbatch of 16 divides over 8 devices."""
    fields = {"simigrad": {"target": 0.5}, "noise_scale": {"decay": 0.5}}[name]
    return config(
        rule(name, interval=2, lower=32, scaling="sqrt", **fields),
        batch_size=64,
        eval__every="1184 examples",
        parallel__backend=backend,
    )


# Under shard_map the parts are the devices', so that another number of them is another statistic.
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
