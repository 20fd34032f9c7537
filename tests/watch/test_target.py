"""Time to a target: the first evaluation that reaches it, where the run ends, what time counts."""

import math
import pathlib
import shutil
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import train as train_lib
from lamb_tpu.config import base_config
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.target import Target
from tests import tiny
from tests.watch.observing import start

TIME = {"seconds": 2.0, "seconds_with_startup": 5.0, "starts": 1}


def made(config: ConfigDict) -> tuple[Target, list[str], Any]:
    """A target of a run of 4 updates an epoch; the lines that it tells, and its start."""
    told: list[str] = []
    target = Target(config, SimpleNamespace(epoch=lambda step: step / 4), told.append)
    begun = start(clock=SimpleNamespace(times=lambda: dict(TIME)))
    target.started(begun)
    return target, told, begun.records.found


def section(**changes: Any) -> ConfigDict:
    return tiny.change(base_config().target, {"metric": "loss", **changes})


@pytest.mark.parametrize(
    "mode, value, step",
    [
        ("max", 0.5, 20),
        ("max", 0.7, 40),
        ("max", 0.71, None),
        ("max", -math.inf, 20),
        ("min", 0.5, 20),
        ("min", 0.3, 30),
        ("min", 0.2, None),
    ],
)
def test_first_that_reaches_it(mode: str, value: float, step: int | None) -> None:
    """Equal is enough, and what is no number reaches nothing."""
    target, told, records = made(section(mode=mode, value=value))
    losses = {10: math.nan, 20: 0.5, 30: 0.3, 40: 0.7, 50: 0.7}
    for at, loss in losses.items():
        target.evaluated(at, {"loss": loss})
    expected = None
    if step is not None:
        expected = {"step": step, "epoch": step / 4, "value": losses[step], **TIME}
    assert target.reached == expected and not told  # the end of the run tells it
    assert records == ([] if step is None else [{**expected, "kind": "target"}])
    assert target.end_reason == ("" if step is None else "stopped at its target")


def test_without_a_metric_nothing_is_reached() -> None:
    target, _, _ = made(base_config().target)
    target.evaluated(1, {"": 1.0, "loss": 1.0})
    assert target.reached is None and not target.may_end_run and target.summary() == ""
    target.check([])


def test_lines() -> None:
    target, told, _ = made(section(value=0.9, stop=False))
    assert target.summary() == "target, loss of at least 0.9: not reached"
    target.evaluated(6, {"loss": 0.91234567})
    assert not target.end_reason
    line = (
        "target, loss of at least 0.9: reached at update 6 (epoch 1.5) with 0.912346, after 2.0 s "
        "of training and evaluation, 5.0 s with start-up and compiling"
    )
    assert target.summary() == line and told == [line]
    again, _, _ = made(section(value=0.9))
    again.restore(target.state() | {"starts": 3})
    assert again.summary() == line + ", in 3 starts" and again.end_reason


def config(**changes: Any) -> ConfigDict:
    """Evaluations after 3, 6, 9 and 12 updates, of averages of the weights too."""
    return tiny.digits(eval__every="3 steps", ema__decay=0.5, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The workdir of such a run without a target, with a checkpoint at each evaluation."""
    workdir = tmp_path_factory.mktemp("whole")
    train(config(checkpoint__every="3 steps"), workdir, quiet=True)
    return workdir


def to(whole: pathlib.Path, metric: str = "accuracy", number: int = 1, **changes: Any) -> Any:
    """A target that the evaluation of that number, and none before it, reaches."""
    values = [record[metric] for record in read_records(whole / "metrics.jsonl", "eval")]
    best = max if changes.get("target__mode", "max") == "max" else min
    assert values[number] != best(values[:number])
    assert values[number] == best(values[: number + 1])
    return config(target__metric=metric, target__value=values[number], **changes)


def records(workdir: pathlib.Path, *kinds: str) -> list[dict[str, Any]]:
    found = [tiny.untimed(record) for record in read_records(workdir / "metrics.jsonl")]
    return [record for record in found if record["kind"] in kinds]


def checkpoints(workdir: pathlib.Path) -> set[str]:
    return {path.name for path in (workdir / "checkpoints").iterdir()}


def state_of(settings: ConfigDict, workdir: pathlib.Path, step: int) -> Any:
    run = prepare(settings, workdir)
    with Checkpoints(run.folder.checkpoints, 1, writes=False) as saved:
        return saved.restore(step, run.abstract_state)[0]


@pytest.fixture(scope="module")
def stopped(
    whole: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ConfigDict, pathlib.Path]:
    """A run that its target has stopped at update 6, where no checkpoint and no log is due."""
    settings = to(whole, log__every="4 steps")
    workdir = tmp_path_factory.mktemp("stopped")
    train(settings, workdir, quiet=True)
    return settings, workdir


@pytest.mark.long
def test_run_ends_at_its_target(
    stopped: tuple[ConfigDict, pathlib.Path], whole: pathlib.Path
) -> None:
    settings, workdir = stopped
    assert checkpoints(workdir) == {"4", "6"}
    tiny.assert_equal(
        state_of(settings, workdir, 6), state_of(config(checkpoint__every="3 steps"), whole, 6)
    )
    evaluated = records(whole, "eval")[:2]
    assert records(workdir, "eval") == evaluated
    (record,) = records(workdir, "target")
    assert record == {
        "step": 6,
        "kind": "target",
        "epoch": 1.5,
        "value": evaluated[1]["accuracy"],
        "starts": 1,
    }
    # An evaluation that may be the end is not ahead of the records: no update is left untold.
    told = [(record["step"], record["updates"]) for record in records(workdir, "train")]
    assert told == [(3, 3), (4, 1), (6, 2)]


def test_stopped_run_does_not_go_on(
    stopped: tuple[ConfigDict, pathlib.Path], capsys: pytest.CaptureFixture
) -> None:
    settings, workdir = stopped
    before = tiny.fingerprint(workdir)
    metrics = train(settings, workdir)
    assert tiny.fingerprint(workdir) == before
    last = read_records(workdir / "metrics.jsonl", "eval")[-1]
    assert metrics == {name: last[name] for name in metrics} and "ema_accuracy" in metrics
    told = tiny.unbroken(capsys.readouterr().out)
    _, _, line = told.rpartition("the run was already stopped at its target: accuracy 0.")
    assert "; target, accuracy of at least 0." in line and "reached at update 6 (epoch 1.5)" in line


def test_stopped_run_goes_on_without_the_stop(
    stopped: tuple[ConfigDict, pathlib.Path],
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture,
) -> None:
    settings, workdir = stopped[0].copy_and_resolve_references(), tmp_path / "on"
    shutil.copytree(stopped[1], workdir)
    settings.target.value += 0.01
    with pytest.raises(UserError, match="another config .target.value: 0.* there, 0.* now"):
        train(settings, workdir, quiet=True)
    settings.target.value = stopped[0].target.value
    settings.target.stop = False
    train(settings, workdir)
    _, ended, line = tiny.unbroken(capsys.readouterr().out).rpartition("12 updates in 0:")
    assert ended and "reached at update 6" in line
    tiny.assert_equal(
        state_of(settings, workdir, 12), state_of(config(checkpoint__every="3 steps"), whole, 12)
    )
    assert records(workdir, "eval") == records(whole, "eval")
    assert records(workdir, "target") == records(stopped[1], "target")


def slowed(function: Any, seconds: float) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slow


@pytest.mark.long
def test_preempted_in_the_evaluation_that_reaches_it(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start-up takes a second longer here and an evaluation half a second.

    A poll is before each update and each of the three batches of an evaluation.
    """
    make = train_lib.make_evaluator
    monkeypatch.setattr(train_lib, "prepare", slowed(train_lib.prepare, 1.0))
    monkeypatch.setattr(
        train_lib, "make_evaluator", lambda *args, **options: slowed(make(*args, **options), 0.5)
    )
    settings, began = to(whole), time.monotonic()
    with monkeypatch.context() as patch:
        tiny.preempt_at(patch, 3 + 3 + 3 + 2)
        with pytest.raises(Preempted, match="at update 6, saved"):
            train(settings, tmp_path, quiet=True)
    took = time.monotonic() - began
    assert not records(tmp_path, "target")
    time.sleep(1.0)  # as a run that is dead
    for _ in range(2):  # that the evaluation is over is not saved, so it comes again
        began = time.monotonic()
        train(settings, tmp_path, quiet=True)
        (record,) = read_records(tmp_path / "metrics.jsonl", "target")
        assert checkpoints(tmp_path) == {"4", "6"}
        assert records(tmp_path, "eval") == records(whole, "eval")[:2]
        assert (record["step"], record["starts"]) == (6, 2)
        # One evaluation of update 3, a part of update 6's, and all of it again.
        assert 1.5 <= record["seconds"] <= record["seconds_with_startup"] - 2.0
        assert record["seconds_with_startup"] <= took + time.monotonic() - began


def test_another_metric_that_is_to_fall(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    settings = to(whole, "ema_loss", 2, target__mode="min", target__stop=False)
    train(settings, tmp_path, quiet=True)
    assert records(tmp_path, "train", "eval") == records(whole, "train", "eval")
    (record,) = records(tmp_path, "target")
    assert (record["step"], record["value"]) == (9, settings.target.value)


def test_never_reached(
    whole: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    train(config(target__metric="accuracy", target__value=1.1), tmp_path)
    assert capsys.readouterr().out.endswith("; target, accuracy of at least 1.1: not reached\n")
    assert not records(tmp_path, "target")
    assert records(tmp_path, "train", "eval") == records(whole, "train", "eval")


def test_phase_that_ends_at_its_target(tmp_path: pathlib.Path) -> None:
    settings = config(target__metric="accuracy", target__value=1.1)
    settings.phases = ConfigDict(
        {"phase_1": {"target": {"value": 0.01}}, "phase_2": {"duration": "2 steps"}}
    )
    for _ in range(2):
        train(settings, tmp_path, quiet=True)
        assert checkpoints(tmp_path / "phase_1") == {"3"}
        assert checkpoints(tmp_path / "phase_2") == {"2"}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"target__metric": "acuracy"},
            "target.metric is 'acuracy'; .* metrics are: accuracy, loss$",
        ),
        ({"target__metric": "ema_loss"}, "target.metric is 'ema_loss'; .* are: accuracy, loss$"),
        ({"target__metric": "loss", "target__mode": "most"}, "mode is 'most'; known: max, min"),
        ({"target__metric": "loss", "target__value": math.nan}, "value is nan; it must be finite"),
        ({"target__value": 0.9}, "value is 0.9, and config.target.metric is ''; give the metric"),
        ({"target__value": "0.9"}, "config.target.value is '0.9'; it must be a number"),
        (
            {"log__mlperf": True},
            "log.mlperf is True, and config.target.metric is ''; give the metric",
        ),
    ],
)
def test_mistakes(tmp_path: pathlib.Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(tiny.digits(**changes), tmp_path, quiet=True)
    assert not (tmp_path / "checkpoints").exists()
