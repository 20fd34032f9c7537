"""Tests training runs: their files, resuming, preemption and failures."""

import json
import os
import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import training
from lamb_tpu.cost import topology
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import MetricsWriter, read_records
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.train import train
from lamb_tpu.watch.guards import Diverged
from tests import tiny
from tests.parallel.nets import NARROW
from tests.raising import rejected


class Interrupted(Exception):
    """Simulates a crash."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, kind: str) -> None:
    """Makes the next run crash when it would write the record of kind `kind` after update `step`."""
    write = MetricsWriter.write

    def interrupted(self: MetricsWriter, now: int, now_kind: str, values: Any) -> None:
        if (now, now_kind) == (step, kind):
            monkeypatch.setattr(MetricsWriter, "write", write)
            raise Interrupted
        write(self, now, now_kind, values)

    monkeypatch.setattr(MetricsWriter, "write", interrupted)


def train_in_segments(
    monkeypatch: pytest.MonkeyPatch,
    config: ConfigDict,
    workdir: pathlib.Path,
    notices: Sequence[tuple[int, int]],
    fails_at: int,
) -> None:
    """Trains a run to its end, and preempts or crashes it several times before that.

    `notices` has a pair for each preemption: the poll just before which SIGTERM arrives, and the
    update that is then saved. After the preemptions, the run crashes at the record of `fails_at`.
    """
    for poll, step in notices:
        with tiny.preempted_at(poll, f"^preempted at update {step}, saved"):
            train(config, workdir, quiet=True)
    interrupt_at(monkeypatch, fails_at, "train")
    with pytest.raises(Interrupted):
        train(config, workdir, quiet=True)
    train(config, workdir, quiet=True)


def without_seconds(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [tiny.untimed(record) for record in read_records(workdir / "metrics.jsonl")]


def steps_compiled(caplog: pytest.LogCaptureFixture) -> int:
    text = "Finished XLA compilation of jit(train_step)"
    return sum(text in record.getMessage() for record in caplog.records)


def test_folder_of_a_run(trained: pathlib.Path) -> None:
    records = read_records(trained / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 13))
    assert [r["step"] for r in records if r["kind"] == "eval"] == [6, 12]
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {"4", "8", "12"}
    metrics = "accuracy loss grad_norm param_norm learning_rate epoch updates seconds"
    assert set(records[0]) == {"step", "kind", *metrics.split()}
    # The first update has no rate: it consists mostly of compilation.
    assert set(records[1]) == set(records[0]) | {"examples_per_second"}
    assert records[3]["epoch"] == 1.0 and records[3]["updates"] == 1
    assert records[-1]["loss"] < records[0]["loss"]


def test_run_without_its_terminal_continues(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        metrics = train(tiny.digits(), tmp_path)
    assert metrics["accuracy"] > 0
    assert len(read_records(tmp_path / "metrics.jsonl", "train")) == 12


def test_rates_exclude_evaluation_and_saving(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation and saving are slowed by half a second; a device's peak is 1 MFLOP/s."""

    taken = []

    def slowed(function: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            time.sleep(0.5)
            result = function(*args, **kwargs)
            taken.append(time.monotonic() - began)
            return result

        return slow

    monkeypatch.setattr(Checkpoints, "save", slowed(Checkpoints.save))
    make = training.make_evaluator
    monkeypatch.setattr(
        training, "make_evaluator", lambda *args, **options: slowed(make(*args, **options))
    )
    monkeypatch.setattr(topology, "peak_flops", {"cpu": 1e6}.get)
    config = tiny.digits(
        duration="6 steps", log__every="3 steps", eval__every="4 steps", checkpoint__every="3 steps"
    )
    train(config, tmp_path, quiet=True)
    first, second = read_records(tmp_path / "metrics.jsonl", "train")
    assert (first["step"], second["step"]) == (3, 6)
    rate = second["examples_per_second"]
    # A save and an evaluation are between the two records; another save and evaluation follow both.
    assert len(taken) == 4
    left_out = second["seconds"] - first["seconds"] - 3 * 64 / rate
    assert left_out == pytest.approx(sum(taken[:2]), abs=0.2)
    # 454,656 model FLOPs per update, on 8 devices.
    assert second["mfu"] == pytest.approx(454_656 / 8e6 * rate / 64)


def test_summary_of_trust_ratios(tmp_path: pathlib.Path) -> None:
    optimizer = tiny.digits().optimizer.to_dict() | {"collect": True}
    train(tiny.digits(optimizer=ConfigDict(optimizer), duration="3 steps"), tmp_path, quiet=True)
    records = read_records(tmp_path / "metrics.jsonl", "train")
    layers = read_records(tmp_path / "metrics.jsonl", "layers")
    for record, ratios in zip(records, layers, strict=True):
        adapted = [ratios[f"ratios/{layer}/kernel"] for layer in ("hidden0", "output")]
        assert ratios["ratios/output/bias"] == 1.0
        assert (record["ratio_min"], record["ratio_max"]) == (min(adapted), max(adapted))
        assert record["ratio_median"] == pytest.approx(np.mean(adapted))


def test_records_have_the_learning_rate_of_the_schedule(
    trained: pathlib.Path, copy: pathlib.Path
) -> None:
    def rates(workdir: pathlib.Path) -> list[float]:
        records = read_records(workdir / "metrics.jsonl", "train")
        return [record["learning_rate"] for record in records]

    # Warm-up over 4 updates to 0.02, then linearly to 0 at update 12.
    expected = [0, 0.005, 0.01, 0.015, *(0.02 * (12 - t) / 8 for t in range(4, 12))]
    np.testing.assert_allclose(rates(trained), expected, rtol=1e-6)
    shutil.rmtree(copy / "checkpoints" / "12")
    train(tiny.digits(), copy, quiet=True)  # repeats updates 8 to 11
    assert rates(copy) == rates(trained)
    tiny.same_state(tiny.digits(), copy, trained)


def test_complete_run_is_only_evaluated(
    copy: pathlib.Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    before = tiny.fingerprint(copy)
    with jax.log_compiles():
        metrics = train(tiny.digits(), copy)
    last = read_records(copy / "metrics.jsonl", "eval")[-1]
    assert metrics == {name: last[name] for name in ("accuracy", "loss")}
    assert "already complete" in capsys.readouterr().out
    assert steps_compiled(caplog) == 0
    assert tiny.fingerprint(copy) == before


def dropout(**changes: Any) -> ConfigDict:
    return tiny.digits(model=ConfigDict({"name": "lenet"}), eval__every="4 steps", **changes)


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("dropout")
    train(dropout(), workdir, quiet=True)
    return workdir


@pytest.mark.long
def test_interrupted_run_with_dropout_resumes_bit_for_bit(
    with_dropout: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    interrupt_at(monkeypatch, 7, "train")
    with jax.log_compiles():
        with pytest.raises(Interrupted):
            train(dropout(), tmp_path, quiet=True)
        assert read_records(tmp_path / "metrics.jsonl")[-1]["step"] == 6
        # The step compiles once for the new state and, below, once for the restored state.
        assert steps_compiled(caplog) == 1
        train(dropout(), tmp_path, quiet=True)
    assert steps_compiled(caplog) == 2
    tiny.same_state(dropout(), tmp_path, with_dropout)
    assert without_seconds(tmp_path) == without_seconds(with_dropout)


@pytest.mark.parametrize("step, kind", [(3, "train"), (6, "eval"), (12, "eval")])
def test_records_are_neither_duplicated_nor_lost(
    tmp_path: pathlib.Path,
    trained: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    kind: str,
) -> None:
    # The first crash precedes all checkpoints; the other crashes follow a checkpoint and more records.
    interrupt_at(monkeypatch, step, kind)
    with pytest.raises(Interrupted):
        train(tiny.digits(), tmp_path, quiet=True)
    train(tiny.digits(), tmp_path, quiet=True)
    assert without_seconds(tmp_path) == without_seconds(trained)


def checkpoints(workdir: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def test_preempted_run_equals_an_uninterrupted_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is ended often by SIGTERM and once by a crash writes the records of an undisturbed run.

    The run polls for signals before each update, and before each of the three batches of an evaluation.
    """
    config = tiny.digits(log__every="5 steps", checkpoint__best="loss", checkpoint__best_mode="min")
    uninterrupted, workdir = tmp_path / "whole", tmp_path / "preempted"
    train(config, uninterrupted, quiet=True)
    for poll, step, saved in [
        (1, 0, []),  # before the first update there is nothing to save
        (3, 2, [2]),  # before the first record
        (1, 2, [2]),  # before any update: the state is already saved
        (3, 4, [2, 4]),  # just after a checkpoint was saved
        (4, 6, [2, 4, 6]),  # in the evaluation after update 6
        (3, 6, [2, 4, 6]),  # in the same evaluation again
    ]:
        message = f"^preempted at update {step}, saved; start" if step else "^preempted before"
        with tiny.preempted_at(poll, message):
            train(config, workdir, quiet=True)
        assert checkpoints(workdir) == saved
    assert not read_records(workdir / "metrics.jsonl", "eval")
    interrupt_at(monkeypatch, 8, "train")
    with pytest.raises(Interrupted):
        train(config, workdir, quiet=True)
    # The evaluation is recorded now, but update 6 is still the last checkpoint.
    assert [r["step"] for r in read_records(workdir / "metrics.jsonl", "eval")] == [6]
    with tiny.preempted_at(3 + 6 + 2, "^preempted at update 12, saved"):  # in the last evaluation
        train(config, workdir, quiet=True)
    train(config, workdir, quiet=True)
    assert without_seconds(workdir) == without_seconds(uninterrupted)
    tiny.same_state(config, workdir, uninterrupted)
    # The state of update 12 was saved before its evaluation.
    best = min(
        read_records(uninterrupted / "metrics.jsonl", "eval"), key=lambda record: record["loss"]
    )
    assert best["step"] == 12 and tiny.restored(config, workdir)[1]["best"]["step"] == 6
    assert evaluate_checkpoint(config, workdir, "best")["step"] == 12
    steps = [r["step"] for r in read_records(workdir / "metrics.jsonl", "train")]
    assert steps == [4, 5, 6, 8, 10, 12]


def test_preempted_complete_run(copy: pathlib.Path) -> None:
    before = tiny.fingerprint(copy)
    with tiny.preempted_at(2, "at update 12, saved"):
        train(tiny.digits(), copy, quiet=True)
    assert tiny.fingerprint(copy) == before


def test_preempted_run_that_diverges_is_not_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"log__every": "12 steps", "checkpoint__every": "12 steps"}
    tiny.preempt_at(monkeypatch, 5)
    with pytest.raises(Diverged, match="at update 2"):
        train(diverging(3e38, **changes), tmp_path, quiet=True)
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("best, preempted", [("accuracy", False), ("loss", False), ("loss", True)])
def test_best_and_permanent_checkpoints_are_kept(
    tmp_path: pathlib.Path, best: str, preempted: bool
) -> None:
    # The default mode is max: the first evaluation has the largest loss and stays the best.
    config = tiny.digits(
        checkpoint__keep=1,
        checkpoint__every="6 steps",
        checkpoint__keep_every="5 steps",
        checkpoint__best=best,
        eval__every="2 steps",
    )
    if preempted:
        with tiny.preempted_at(13, "at update 6"):
            train(config, tmp_path, quiet=True)
    train(config, tmp_path, quiet=True)
    evaluations = read_records(tmp_path / "metrics.jsonl", "eval")
    expected = max(evaluations, key=lambda record: record[best])
    assert best != "loss" or expected["step"] == 2
    assert checkpoints(tmp_path) == sorted({5, 10, 12, expected["step"]})
    metrics = evaluate_checkpoint(config, tmp_path, "best")
    assert metrics["step"] == expected["step"]
    assert metrics[best] == pytest.approx(expected[best], rel=1e-6)


ROUNDED = {"name": "lamb", "learning_rate": 0.01, "stochastic_rounding": True}
BFLOAT16 = {"model": ConfigDict({"name": NARROW}), "optimizer": ConfigDict(ROUNDED)}
FROZEN = {"name": "onebit_adam", "learning_rate": 0.01, "freeze_step": 1}
PROMOTED: dict[str, dict[str, Any]] = {
    "jit": {},
    "shard_map": {
        "parallel__backend": "shard_map",
        "parallel__exchange": ConfigDict({"name": "onebit"}),
        "optimizer": ConfigDict(FROZEN),
    },
    "jit-bfloat16": BFLOAT16,
    "shard_map-bfloat16": {**BFLOAT16, "parallel__backend": "shard_map"},
}


@pytest.mark.parametrize("changes", PROMOTED.values(), ids=PROMOTED)
def test_strict_promotion(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    config = tiny.digits(
        duration="2 steps",
        eval__every="2 steps",
        accumulation_steps=2,
        ema__decay=0.9,
        guards__desync_every="1 steps",
        task__label_smoothing=0.1,
        **changes,
    )
    with jax.numpy_dtype_promotion("strict"):
        train(config, tmp_path)
    records = read_records(tmp_path / "metrics.jsonl")
    assert any("ema_accuracy" in record for record in records)


def test_no_best_checkpoint(copy: pathlib.Path) -> None:
    problem, remedy = "has no best checkpoint", "use --step=4, 8 or 12"
    with rejected(f"--workdir {copy}", problem=problem, remedy=remedy):
        evaluate_checkpoint(tiny.digits(), copy, "best")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("best", "acuracy", "config.checkpoint.best='acuracy' is unknown; use accuracy or loss"),
        ("best", "ema_loss", "config.checkpoint.best='ema_loss' is unknown; use accuracy or loss"),
        ("best_mode", "most", "config.checkpoint.best_mode='most' is unknown; use max or min"),
        ("keep_every", "5 stops", "config.checkpoint.keep_every: '5 stops' "),
    ],
)
def test_errors_about_checkpoints(
    tmp_path: pathlib.Path, key: str, value: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(tiny.digits(**{f"checkpoint__{key}": value}), tmp_path / "new", quiet=True)
    assert not (tmp_path / "new" / "checkpoints").exists()


def test_averages_have_a_best_too(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(ema__decay=0.5, checkpoint__best="ema_accuracy", duration="2 steps")
    train(config, tmp_path, quiet=True)
    assert evaluate_checkpoint(config, tmp_path, "best")["step"] == 2


def damage(workdir: pathlib.Path, step: int) -> None:
    largest = max((workdir / "checkpoints" / str(step)).rglob("*"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])


def test_damaged_checkpoint_is_skipped(
    copy: pathlib.Path, trained: pathlib.Path, capfd: pytest.CaptureFixture
) -> None:
    damage(copy, 8)
    damage(copy, 12)
    # The damaged checkpoints must not count as the one checkpoint to keep.
    train(tiny.digits(checkpoint__every="3 steps", checkpoint__keep=1), copy)
    out, err = capfd.readouterr()
    assert err.count("cannot be read") == 2 and "resumed from the checkpoint of update 4" in out
    assert "Traceback" not in out + err
    assert checkpoints(copy) == [12]
    tiny.same_state(tiny.digits(), copy, trained)
    assert [r["step"] for r in read_records(copy / "metrics.jsonl", "eval")] == [6, 12]


def test_all_checkpoints_damaged(copy: pathlib.Path) -> None:
    for step in (4, 8, 12):
        damage(copy, step)
    before = tiny.fingerprint(copy)
    with rejected(f"none of the checkpoints [4, 8, 12] in {copy / 'checkpoints'}"):
        train(tiny.digits(), copy, quiet=True)
    after = tiny.fingerprint(copy)
    del before["run.jsonl"], after["run.jsonl"]
    assert after == before


def test_second_run_in_one_folder(copy: pathlib.Path) -> None:
    with Workdir(copy).hold(), pytest.raises(UserError, match=f"{copy} is in use by another run"):
        train(tiny.digits(), copy, quiet=True)


def diverging(rate: float, **changes: Any) -> ConfigDict:
    # During the warm-up, the rate grows from 0 by a third of `rate` per update. Update 0 changes
    # nothing, so the checkpoint of update 1 is finite.
    return tiny.digits(
        optimizer=ConfigDict({"name": "sgd", "learning_rate": rate}),
        schedule__warmup="3 steps",
        **{"checkpoint__every": "1 steps", **changes},
    )


@pytest.mark.parametrize(
    "config, message",
    [
        (diverging(1e20), r"(loss|grad_norm|param_norm) became (nan|inf) at update [23]"),
        # The parameters are infinite after an update with finite loss and gradient.
        (diverging(3e38), r"param_norm became (nan|inf) at update 2"),
        (
            diverging(3e38, log__every="12 steps", checkpoint__every="12 steps"),
            r"param_norm became .* at update 2 .*; the last checkpoint is not yet written",
        ),
    ],
)
def test_diverged_run_stops_and_keeps_the_checkpoint_before(
    tmp_path: pathlib.Path, config: ConfigDict, message: str
) -> None:
    with pytest.raises(Diverged, match=message) as error:
        train(config, tmp_path, quiet=True)
    assert "(learning rate " in str(error.value) and "new --workdir" in str(error.value)
    if "not yet written" in str(error.value):
        assert not list((tmp_path / "checkpoints").iterdir())
        return
    state, position = tiny.restored(config, tmp_path)
    assert all(np.isfinite(leaf).all() for leaf in tiny.arrays(state.params).values())
    assert f"the last checkpoint is {tmp_path}/checkpoints/{int(state.step)}." in str(error.value)
    steps = [record["step"] for record in read_records(tmp_path / "metrics.jsonl")]
    assert max(steps) == int(state.step) == position["loader"]["examples"] // 64


def test_tensorboard_mirrors_the_records(tmp_path: pathlib.Path) -> None:
    train(tiny.digits(log__tensorboard=True, duration="2 steps"), tmp_path, quiet=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes() and b"eval/accuracy" in events.read_bytes()


def test_receipt_records_the_run(trained: pathlib.Path) -> None:
    (line,) = (trained / "run.jsonl").read_text().splitlines()
    receipt = json.loads(line)
    assert receipt["devices"] == 8 and receipt["mesh"] == {"data": 8}
    assert receipt["jax"] == jax.__version__
