"""The log in MLPerf's format: its lines and their order, also in a run that is resumed."""

import json
import pathlib
import time
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import Preempted
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.mlperf import MLPerfLog, hyperparameters
from lamb_tpu.watch.target import Target
from tests import tiny
from tests.watch.observing import start


def lines(workdir: pathlib.Path) -> list[dict[str, Any]]:
    text = (workdir / "mlperf.log").read_text()
    assert text.endswith("\n")
    heads, objects = zip(*(line.split(" ", 1) for line in text.splitlines()), strict=True)
    assert set(heads) == {":::MLLOG"}
    actual = [json.loads(item) for item in objects]
    for line in actual:
        keys = ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert list(line) == keys and type(line["time_ms"]) is int
    return actual


def events(actual: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns the key, type and metadata of each line, except the lines of hyperparameters."""
    types = {"INTERVAL_START": "start", "INTERVAL_END": "end", "POINT_IN_TIME": "point"}
    return [
        (line["key"], types[line["event_type"]], line["metadata"])
        for line in actual
        if line["event_type"] != "POINT_IN_TIME" or line["key"] == "eval_accuracy"
    ]


def config(**changes: Any) -> ConfigDict:
    """Returns a config of two blocks, each of 6 updates (1.5 epochs); the second reaches the target."""
    target = {"target__metric": "loss", "target__mode": "min", "target__value": 2.15}
    return tiny.digits(log__mlperf=True, **target | changes)


def block(first_epoch: int, begin: int, end: int) -> list[tuple[str, str, dict[str, Any]]]:
    metadata = {"first_epoch_num": first_epoch, "epoch_count": (end - begin) * 64 / 256}
    place = {"epoch_num": end / 4, "samples_count": end * 64}
    return [
        ("block_start", "start", {**metadata, "samples_count": begin * 64}),
        ("block_stop", "end", {**metadata, "samples_count": end * 64}),
        ("eval_start", "start", place),
        ("eval_stop", "end", place),
        ("eval_accuracy", "point", {**place, "metric": "loss"}),
    ]


INIT = [("init_start", "start", {}), ("init_stop", "end", {})]


def test_run_to_its_target(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    values = config()
    began = time.time()
    with jax.log_compiles():
        train(values, tmp_path, quiet=True)
    actual, ended = lines(tmp_path), time.time()
    losses = [record["loss"] for record in read_records(tmp_path / "metrics.jsonl", "eval")]
    assert losses[0] > 2.15 >= losses[1]  # otherwise, choose another target
    assert events(actual) == [
        *INIT,
        ("run_start", "start", {"samples_count": 0}),
        *block(1, 0, 6),
        *block(2, 6, 12),
        ("run_stop", "end", {"status": "success", "epoch_num": 3.0, "samples_count": 768}),
    ]
    assert [line["value"] for line in actual if line["key"] == "eval_accuracy"] == losses

    times = [line["time_ms"] for line in actual]
    assert times == sorted(times) and began * 1000 - 1 <= times[0] <= times[-1] <= ended * 1000
    when = {line["key"]: line["time_ms"] for line in actual}
    (record,) = read_records(tmp_path / "metrics.jsonl", "target")
    taken = (when["run_stop"] - when["run_start"]) / 1000
    assert taken == pytest.approx(record["seconds"], abs=0.1)
    taken = (when["run_stop"] - when["init_start"]) / 1000
    assert taken == pytest.approx(record["seconds_with_startup"], abs=0.1)
    # Everything is compiled once, before the clock starts.
    for name in ("train_step", "evaluate"):
        (at,) = [
            compiled.created * 1000
            for compiled in caplog.records
            if f"Finished XLA compilation of jit({name})" in compiled.getMessage()
        ]
        assert at <= when["init_stop"] + 1
    before = tiny.fingerprint(tmp_path)
    train(values, tmp_path, quiet=True)
    assert tiny.fingerprint(tmp_path) == before


def test_other_starts_are_appended(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempts all evaluations but the last; runs poll for signals before each update and eval batch."""
    settings = config(eval__every="4 steps")
    for poll in (4 + 2, 3 + 4 + 2):
        with monkeypatch.context() as patch:
            tiny.preempt_at(patch, poll)
            with pytest.raises(Preempted):
                train(settings, tmp_path, quiet=True)
    train(settings, tmp_path, quiet=True)
    actual = events(lines(tmp_path))
    aborted = ("run_stop", "end", {"status": "aborted"})
    assert actual == [
        *INIT,
        ("run_start", "start", {"samples_count": 0}),
        *block(1, 0, 4)[:3],
        aborted,
        *INIT,
        ("run_start", "start", {"samples_count": 256}),
        *block(1, 0, 4)[2:],
        *block(2, 4, 8)[:3],
        aborted,
        *INIT,
        ("run_start", "start", {"samples_count": 512}),
        *block(2, 4, 8)[2:],
        *block(3, 8, 12),
        ("run_stop", "end", {"status": "success", "epoch_num": 3.0, "samples_count": 768}),
    ]


def test_no_lines_after_the_target(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = config(target__value=100.0, target__stop=False)
    with monkeypatch.context() as patch:
        tiny.preempt_at(patch, 6 + 3 + 2)
        with pytest.raises(Preempted, match="at update 7"):
            train(values, tmp_path, quiet=True)
    before = (tmp_path / "mlperf.log").read_bytes()
    assert events(lines(tmp_path))[-1][2]["status"] == "success"
    train(values, tmp_path, quiet=True)
    assert (tmp_path / "mlperf.log").read_bytes() == before


def test_off_by_default(trained: pathlib.Path) -> None:
    assert not (trained / "mlperf.log").exists()


def test_target_not_reached_and_fractional_epochs(tmp_path: pathlib.Path) -> None:
    """With 391 examples an epoch has 6.1 updates, so evaluations come after updates 7 and 13."""
    settings = tiny.digits(
        duration="3 epochs",
        eval__every="1 epochs",
        data__train_split="train[:391]",
        log__mlperf=True,
        target__metric="loss",
        target__mode="min",
    )
    run = prepare(settings, tmp_path)
    log = MLPerfLog(run, Target(run.spec.target, CurrentRecipe(run.recipe), print))
    log.started(start(5))
    log.updating(5)
    log.updating(6)  # in the same block
    with log.paused(6, "save"), log.paused(7, "evaluation"):
        pass
    log.evaluated(7, {"loss": float("nan")})
    log.updating(7)
    log.ended()
    actual = lines(tmp_path)
    assert [line["metadata"] for line in actual if line["key"] == "block_start"] == [
        {"first_epoch_num": 1, "epoch_count": pytest.approx(2 * 64 / 391), "samples_count": 320},
        {"first_epoch_num": 2, "epoch_count": pytest.approx(6 * 64 / 391), "samples_count": 448},
    ]
    (accuracy,) = [line for line in actual if line["key"] == "eval_accuracy"]
    assert accuracy["value"] == "nan"
    assert accuracy["metadata"]["epoch_num"] == pytest.approx(448 / 391)
    assert (actual[-1]["key"], actual[-1]["metadata"]) == ("run_stop", {"status": "aborted"})
    log.evaluated(7, {"loss": 0.0})  # too late
    assert lines(tmp_path) == actual


COMMON = {
    "global_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "train_samples": 256,
    "eval_samples": 360,
    "seed": 7,
    "opt_base_learning_rate": 0.04,
    "opt_learning_rate_warmup_steps": 4.0,
    "opt_learning_rate_warmup_epochs": 1.0,
    "opt_learning_rate_training_steps": 12,
}


@pytest.mark.parametrize(
    "optimizer, expected",
    [
        (
            {"name": "lamb", "b2": 0.98},
            {
                "opt_name": "lamb",
                "opt_lamb_beta_1": 0.9,
                "opt_lamb_beta_2": 0.98,
                "opt_lamb_epsilon": 1e-6,
                "opt_lamb_weight_decay_rate": 0.01,
            },
        ),
        (
            {"name": "lars", "weight_decay": 2e-4, "momentum": 0.95},
            {
                "opt_name": "lars",
                "lars_opt_momentum": 0.95,
                "lars_opt_weight_decay": 2e-4,
                "lars_epsilon": 0.0,
                "lars_opt_base_learning_rate": 0.04,
                "lars_opt_learning_rate_warmup_epochs": 1.0,
                "lars_opt_end_learning_rate": 0.004,
                "lars_opt_learning_rate_decay_poly_power": 2.0,
                "lars_opt_learning_rate_decay_steps": 12,
            },
        ),
        (
            {"name": "momentum", "weight_decay": 5e-5},
            {
                "opt_name": "sgd",
                "sgd_opt_momentum": 0.9,
                "sgd_opt_weight_decay": 5e-5,
                "sgd_opt_base_learning_rate": 0.04,
                "sgd_opt_end_learning_rate": 0.004,
                "sgd_opt_learning_rate_decay_poly_power": 2.0,
                "sgd_opt_learning_rate_decay_steps": 12,
            },
        ),
        (
            {"name": "adamw"},
            {
                "opt_name": "adamw",
                "opt_adamw_beta_1": 0.9,
                "opt_adamw_beta_2": 0.999,
                "opt_adamw_epsilon": 1e-8,
                "opt_adamw_weight_decay": 0.01,
            },
        ),
        (
            {"name": "novograd", "weight_decay": 0.5},
            {"opt_name": "novograd", "opt_weight_decay": 0.5},
        ),
    ],
)
def test_hyperparameters(optimizer: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = tiny.digits(
        optimizer=ConfigDict({"learning_rate": 0.02, "rules": "no_bias_no_norm", **optimizer}),
        schedule__scaling="linear",
        schedule__base_batch_size=32,
        schedule__power=2.0,
        schedule__end_factor=0.1,
        seed=7,
        accumulation_steps=2,
        ema__decay=0.5,
    )
    actual = hyperparameters(prepare(settings, None))
    assert actual == pytest.approx(COMMON | expected | {"model_eval_ema_factor": 0.5})
    json.dumps(actual)


def test_preset_of_an_optimizer() -> None:
    settings = tiny.digits(
        optimizer=ConfigDict({"name": "lars", "learning_rate": 0.02, "preset": "optax"})
    )
    assert hyperparameters(prepare(settings, None))["lars_opt_weight_decay"] == 0.0
