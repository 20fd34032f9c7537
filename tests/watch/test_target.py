"""Time to a target: the first evaluation that reaches the target, the run's end, and the times."""

import math
import pathlib
import shutil
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import spec_keys, training
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.target import Target
from tests import tiny
from tests.raising import rejected
from tests.watch.observing import start

TIME = {"seconds": 2.0, "seconds_with_startup": 5.0, "starts": 1}


def made(config: spec_keys.Target) -> tuple[Target, list[str], Any]:
    """Returns a Target for 4 updates per epoch, and the lists that get its messages and records."""
    output: list[str] = []
    target = Target(
        config, CurrentRecipe(SimpleNamespace(epoch=lambda step: step / 4)), output.append
    )
    begun = start(clock=SimpleNamespace(times=lambda: dict(TIME)))
    target.started(begun)
    return target, output, begun.records.actual


def section(**changes: Any) -> spec_keys.Target:
    return spec_keys.Target(**{"metric": "loss", **changes})


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
def test_the_first_evaluation_that_reaches_the_target(
    mode: str, value: float, step: int | None
) -> None:
    """An equal value reaches the target; NaN does not."""
    target, output, records = made(section(mode=mode, value=value))
    losses = {10: math.nan, 20: 0.5, 30: 0.3, 40: 0.7, 50: 0.7}
    for at, loss in losses.items():
        target.evaluated(at, {"loss": loss})
    expected = None
    if step is not None:
        expected = {"step": step, "epoch": step / 4, "value": losses[step], **TIME}
    assert target.reached == expected and not output  # the end of the run reports it
    assert records == ([] if step is None else [{**expected, "kind": "target"}])
    assert target.end_reason == ("" if step is None else "stopped at its target")


def test_without_a_metric_nothing_is_reached() -> None:
    target, _, _ = made(spec_keys.Target())
    target.evaluated(1, {"": 1.0, "loss": 1.0})
    assert target.reached is None and not target.may_end_run and target.summary() == ""
    target.check([])


def test_lines() -> None:
    target, output, _ = made(section(value=0.9, stop=False))
    assert target.summary() == "target, loss of at least 0.9: not reached"
    target.evaluated(6, {"loss": 0.91234567})
    assert not target.end_reason
    line = (
        "target, loss of at least 0.9: reached at update 6 (epoch 1.5) with 0.912346, after 2.0 s "
        "of training and evaluation, 5.0 s with start-up and compiling"
    )
    assert target.summary() == line and output == [line]
    again, _, _ = made(section(value=0.9))
    again.restore(target.state() | {"starts": 3})
    assert again.summary() == line + ", in 3 starts" and again.end_reason


def config(**changes: Any) -> ConfigDict:
    """Returns a config with weight averaging, and with evaluations after 3, 6, 9 and 12 updates."""
    return tiny.digits(eval__every="3 steps", ema__decay=0.5, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns the workdir of a run without a target, with a checkpoint at each evaluation."""
    workdir = tmp_path_factory.mktemp("whole")
    train(config(checkpoint__every="3 steps"), workdir, quiet=True)
    return workdir


def to(whole: pathlib.Path, metric: str = "accuracy", number: int = 1, **changes: Any) -> Any:
    """Returns a config whose target is first reached by evaluation `number`, counted from 0."""
    values = [record[metric] for record in read_records(whole / "metrics.jsonl", "eval")]
    best = max if changes.get("target__mode", "max") == "max" else min
    assert values[number] != best(values[:number])
    assert values[number] == best(values[: number + 1])
    return config(target__metric=metric, target__value=values[number], **changes)


def records(workdir: pathlib.Path, *categories: str) -> list[dict[str, Any]]:
    actual = [tiny.untimed(record) for record in read_records(workdir / "metrics.jsonl")]
    return [record for record in actual if record["kind"] in categories]


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
    """Returns config and workdir of a run that stopped at update 6, when no save or log was due."""
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
    value = evaluated[1]["accuracy"]
    assert record == dict(step=6, kind="target", epoch=1.5, value=value, starts=1)
    # If an evaluation may end the run, all earlier updates are recorded before it.
    output = [(record["step"], record["updates"]) for record in records(workdir, "train")]
    assert output == [(3, 3), (4, 1), (6, 2)]


def test_a_stopped_run_does_not_continue(
    stopped: tuple[ConfigDict, pathlib.Path], capsys: pytest.CaptureFixture
) -> None:
    settings, workdir = stopped
    before = tiny.fingerprint(workdir)
    metrics = train(settings, workdir)
    assert tiny.fingerprint(workdir) == before
    last = read_records(workdir / "metrics.jsonl", "eval")[-1]
    assert metrics == {name: last[name] for name in metrics} and "ema_accuracy" in metrics
    output = tiny.unbroken(capsys.readouterr().out)
    _, _, line = output.rpartition("the run was already stopped at its target: accuracy 0.")
    assert "; target, accuracy of at least 0." in line and "reached at update 6 (epoch 1.5)" in line


def test_a_stopped_run_continues_without_stop(
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
    """Start-up takes one second longer than usual, and each evaluation half a second.

    The run polls for signals before each update, and before each of an evaluation's three batches.
    """
    make = training.make_evaluator
    monkeypatch.setattr(training, "prepare", slowed(training.prepare, 1.0))
    monkeypatch.setattr(
        training, "make_evaluator", lambda *args, **options: slowed(make(*args, **options), 0.5)
    )
    settings, began = to(whole), time.monotonic()
    with monkeypatch.context() as patch:
        tiny.preempt_at(patch, 3 + 3 + 3 + 2)
        with pytest.raises(Preempted, match="at update 6, saved"):
            train(settings, tmp_path, quiet=True)
    took = time.monotonic() - began
    assert not records(tmp_path, "target")
    time.sleep(1.0)  # time between two starts
    for _ in range(2):  # the evaluation is repeated, because its end was not saved
        began = time.monotonic()
        train(settings, tmp_path, quiet=True)
        (record,) = read_records(tmp_path / "metrics.jsonl", "target")
        assert checkpoints(tmp_path) == {"4", "6"}
        assert records(tmp_path, "eval") == records(whole, "eval")[:2]
        assert (record["step"], record["starts"]) == (6, 2)
        # Three slow evaluations: after update 3, an incomplete one after update 6, and its repetition.
        assert 1.5 <= record["seconds"] <= record["seconds_with_startup"] - 2.0
        assert record["seconds_with_startup"] <= took + time.monotonic() - began


def test_a_metric_to_minimize(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
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
        ({"metric": "acuracy"}, ("acuracy", "is unknown", "did you mean accuracy")),
        ({"metric": "ema_loss"}, ("ema_loss", "is unknown", "use accuracy or loss")),
        ({"metric": "loss", "mode": "most"}, ("most", "is unknown", "use max or min")),
        ({"metric": "loss", "value": math.nan}, (..., "is not finite", "use a finite number")),
        (
            {"value": 0.9},
            (0.9, "has no effect while config.target.metric is ''", "set config.target.metric"),
        ),
        ({"value": "0.9"}, ("0.9", "has the wrong type", "use a number")),
    ],
)
def test_errors(tmp_path: pathlib.Path, changes: dict[str, Any], message: tuple[Any, ...]) -> None:
    with rejected(f"config.target.{[*changes][-1]}", *message):
        train(tiny.digits(**{f"target__{k}": v for k, v in changes.items()}), tmp_path, quiet=True)
    assert not (tmp_path / "checkpoints").exists()


def test_mlperf_needs_a_target(tmp_path: pathlib.Path) -> None:
    problem = "has no effect while config.target.metric is ''"
    with rejected("config.log.mlperf", True, problem, "set config.target.metric"):
        train(tiny.digits(log__mlperf=True), tmp_path, quiet=True)


def test_lost_record_is_written_again() -> None:
    target, _, _ = made(section())
    reached = {"step": 20, "epoch": 5.0, "value": 0.5, **TIME}
    target.restore(reached)
    begun = start(step=30)
    target.started(begun)
    assert begun.records.actual == []
    begun.records.missing["target"] = 1
    target.started(begun)
    assert begun.records.actual == [{**reached, "kind": "target"}]
