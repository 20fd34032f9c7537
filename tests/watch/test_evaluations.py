"""Evaluations with non-finite metrics."""

import json
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from lamb_tpu import evaluate, spec
from lamb_tpu.store.metrics import read_records
from lamb_tpu.tasks.classification import Classification
from lamb_tpu.train import train
from lamb_tpu.watch.best import Best
from lamb_tpu.watch.evaluations import Evaluations, check_finite
from lamb_tpu.watch.guards import Diverged
from lamb_tpu.watch.target import Target
from tests import tiny
from tests.watch.observing import start


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_nonfinite_metric_ends_the_run(value: float) -> None:
    warned: list[str] = []
    observer = Evaluations(False, warned.append)
    observer.started(start())
    observer.evaluated(10, {"loss": 1.0, "accuracy": 0.5})
    with pytest.raises(
        Diverged,
        match=f"^the evaluation after update 20 is not finite: loss "
        f"{value}; the last checkpoint is runs/x/40. Check the data of ",
    ):
        observer.evaluated(20, {"loss": value, "accuracy": 0.5})
    assert not warned


def test_allow_nonfinite_eval() -> None:
    warned: list[str] = []
    check_finite("the evaluation", {"loss": math.nan}, True, warned.append)
    assert warned == [
        "the evaluation is not finite: loss nan; config.guards.allow_nonfinite_eval is True"
    ]


@pytest.mark.parametrize("mode, worst", [("max", math.inf), ("min", -math.inf)])
def test_infinity_never_is_the_best(mode: str, worst: float) -> None:
    best = Best("score", mode)
    for step, value in enumerate([worst, 0.5, worst, -worst]):
        best.evaluated(step, {"score": value})
    assert (best.step, best.value) == (1, 0.5)


@pytest.mark.parametrize("mode, worst", [("max", math.inf), ("min", -math.inf)])
def test_infinity_never_reaches_the_target(mode: str, worst: float) -> None:
    config = tiny.digits(target__metric="score", target__value=0.5, target__mode=mode)
    target = Target(spec.parse(config).target, None, print)  # type: ignore[arg-type]
    target.evaluated(6, {"score": worst})
    assert target.reached is None and not target.end_reason


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the loss of evaluations NaN, like that of a diverged model."""
    measure = Classification.evaluate

    def measured(self, params, model_state, batch):
        sums = dict(measure(self, params, model_state, batch))
        total, weight = sums["loss"]
        return {**sums, "loss": (total * math.nan, weight)}

    monkeypatch.setattr(Classification, "evaluate", measured)


@pytest.mark.long
def test_training_ends_at_a_nonfinite_evaluation(
    tmp_path: pathlib.Path,
    blind: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    config = tiny.digits(checkpoint__best="accuracy", target__metric="accuracy", target__value=0.01)
    with pytest.raises(Diverged, match="^the evaluation after update 6 is not finite: loss nan"):
        train(config, tmp_path, quiet=True)
    (record,) = read_records(tmp_path / "metrics.jsonl", "eval")
    assert record["step"] == 6 and record["loss"] == "nan" and 0 <= record["accuracy"] <= 1
    assert not read_records(tmp_path / "metrics.jsonl", "target")
    assert int(tiny.restored(config, tmp_path)[0].step) == 4  # the state is not saved

    # The command prints the metrics as JSON, and fails.
    monkeypatch.setattr("absl.flags.FLAGS", tiny_flags(tmp_path))
    capsys.readouterr()
    with pytest.raises(Diverged, match="^the evaluation is not finite: loss nan"):
        evaluate.main()
    assert json.loads(capsys.readouterr().out)["loss"] == "nan"

    config.guards.allow_nonfinite_eval = True
    metrics = train(config, tmp_path, quiet=True)
    assert math.isnan(metrics["loss"])
    output = tiny.unbroken(capsys.readouterr().err)
    assert "the evaluation after update 6 is not finite: loss nan; config.guards.allow" in output


def tiny_flags(workdir: pathlib.Path) -> SimpleNamespace:
    processes = ("cpu_devices", "coordinator_address", "num_processes", "process_id")
    unset = dict.fromkeys(("step", "config", "split", *processes))
    return SimpleNamespace(workdir=str(workdir), trust_workdir=False, **unset)
