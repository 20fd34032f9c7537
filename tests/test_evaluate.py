"""Tests the evaluation of a workdir's checkpoints, and its errors."""

import errno
import os
import pathlib
import shutil

import pytest

from lamb_tpu import evaluate
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.files import writing
from lamb_tpu.run.build import prepare
from lamb_tpu.store.metrics import read_records
from tests import tiny
from tests.raising import rejected


def test_checkpoints_give_the_metrics_of_the_run(trained: pathlib.Path) -> None:
    settings = tiny.digits()
    records = read_records(trained / "metrics.jsonl", "eval")
    newest = evaluate_checkpoint(settings, trained)
    assert newest == {"step": 12, **{k: records[-1][k] for k in ("accuracy", "loss")}}
    before = evaluate_checkpoint(settings, trained, step=8)
    assert before["step"] == 8 and before["loss"] > newest["loss"]


def test_the_config_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, copy: pathlib.Path) -> None:
    metrics = evaluate_checkpoint(None, copy)
    assert metrics == evaluate_checkpoint(tiny.digits(), copy)
    other = evaluate_checkpoint(None, copy, split="test[:100]")
    again = evaluate_checkpoint(tiny.digits(data__eval_split="test[:100]"), copy)
    assert other == again and other["step"] == metrics["step"] and other["loss"] != metrics["loss"]
    # Files of another split do not overwrite those of the run's split.
    makers = []
    monkeypatch.setattr(
        evaluate, "make_evaluator", lambda *_, **options: makers.append(options) or (lambda _: {})
    )
    evaluate_checkpoint(None, copy, split="test[:100]")
    evaluate_checkpoint(None, copy, split=tiny.digits().data.eval_split)
    assert [options["files_prefix"] for options in makers] == ["test_100_", ""]


def test_read_only_folder(
    copy: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    expected, before = evaluate_checkpoint(None, copy), tiny.fingerprint(copy)

    def reject(folder: pathlib.Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(writing, "try_out", reject)
    assert evaluate_checkpoint(None, copy) == expected
    assert tiny.fingerprint(copy) == before
    with rejected(f"--workdir {copy}", problem="cannot be written (Read-only file system"):
        prepare(tiny.digits(), copy)
    # A folder with the name of a task's file prevents writing that file.
    (copy / "predictions.json").mkdir()
    monkeypatch.setattr(
        evaluate,
        "make_evaluator",
        lambda *_, keep_file, **__: lambda _: keep_file("predictions.json", "{}") or {"f1": 1.0},
    )
    assert evaluate_checkpoint(None, copy)["f1"] == 1.0
    output = f"predictions.json is not written: {copy}/predictions.json is a folder, not a file"
    assert tiny.unbroken(capsys.readouterr().err).startswith(output)


def test_missing_run_and_checkpoint(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with rejected("*", problem="has no checkpoint of update 9", remedy="use one of 4, 8, 12"):
        evaluate_checkpoint(tiny.digits(), trained, step=9)
    with rejected("*none", problem="holds no run: config.json is missing"):
        evaluate_checkpoint(tiny.digits(), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with rejected("*", problem="holds a run of another config (seed: 0 there, 1 now"):
        evaluate_checkpoint(tiny.digits(seed=1), trained)


def test_run_without_a_checkpoint_yet(copy: pathlib.Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with rejected(f"--workdir {copy}", problem="has no checkpoint yet"):
        evaluate_checkpoint(tiny.digits(), copy)


def test_damaged_checkpoint(copy: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (copy / "checkpoints" / "12" / "state" / "manifest.ocdbt").unlink()
    assert evaluate_checkpoint(tiny.digits(), copy)["step"] == 8
    captured = capsys.readouterr()
    assert "the checkpoint of update 12" in captured.err and not captured.out
    with rejected("*", problem="state/manifest.ocdbt is missing"):
        evaluate_checkpoint(tiny.digits(), copy, step=12)
