"""Evaluation of checkpoints of a workdir, and what is refused."""

import errno
import os
import pathlib
import shutil

import pytest

from lamb_tpu import evaluate
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.files import writing
from lamb_tpu.run.build import prepare
from lamb_tpu.store.metrics import read_records
from tests import tiny


def test_checkpoints_give_the_metrics_of_the_run(trained: pathlib.Path) -> None:
    settings = tiny.digits()
    records = read_records(trained / "metrics.jsonl", "eval")
    newest = evaluate_checkpoint(settings, trained)
    assert newest == {"step": 12, **{k: records[-1][k] for k in ("accuracy", "loss")}}
    before = evaluate_checkpoint(settings, trained, step=8)
    assert before["step"] == 8 and before["loss"] > newest["loss"]


def test_the_config_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, copy: pathlib.Path) -> None:
    own = evaluate_checkpoint(None, copy)
    assert own == evaluate_checkpoint(tiny.digits(), copy)
    other = evaluate_checkpoint(None, copy, split="test[:100]")
    again = evaluate_checkpoint(tiny.digits(data__eval_split="test[:100]"), copy)
    assert other == again and other["step"] == own["step"] and other["loss"] != own["loss"]
    # What is kept of another split does not take the place of the run's own.
    makers = []
    monkeypatch.setattr(
        evaluate, "make_evaluator", lambda *_, **options: makers.append(options) or (lambda _: {})
    )
    evaluate_checkpoint(None, copy, split="test[:100]")
    evaluate_checkpoint(None, copy, split=tiny.digits().data.eval_split)
    assert [options["files_prefix"] for options in makers] == ["test_100_", ""]


def test_run_that_may_only_be_read(
    copy: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    expected, before = evaluate_checkpoint(None, copy), tiny.fingerprint(copy)

    def refuse(folder: pathlib.Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(writing, "try_out", refuse)
    assert evaluate_checkpoint(None, copy) == expected
    assert tiny.fingerprint(copy) == before
    with pytest.raises(UserError, match="cannot be written .Read-only file system"):
        prepare(tiny.digits(), copy)
    # And a task's files, which a folder stands in the way of.
    (copy / "predictions.json.new").mkdir()
    monkeypatch.setattr(
        evaluate,
        "make_evaluator",
        lambda *_, keep_file, **__: lambda _: keep_file("predictions.json", "{}") or {"f1": 1.0},
    )
    assert evaluate_checkpoint(None, copy)["f1"] == 1.0
    told = f"predictions.json is not written: {copy}/predictions.json cannot be written (Is a dir"
    assert tiny.unbroken(capsys.readouterr().err).startswith(told)


def test_what_is_not_there(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of update 9; it has: 4, 8, 12"):
        evaluate_checkpoint(tiny.digits(), trained, step=9)
    with pytest.raises(UserError, match="holds no run: config.json is missing"):
        evaluate_checkpoint(tiny.digits(), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="holds a run of another config .seed: 0 there, 1 now"):
        evaluate_checkpoint(tiny.digits(seed=1), trained)


def test_run_without_a_checkpoint_yet(copy: pathlib.Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match=f"--workdir {copy} has no checkpoint yet"):
        evaluate_checkpoint(tiny.digits(), copy)


def test_damaged_checkpoint(copy: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (copy / "checkpoints" / "12" / "state" / "manifest.ocdbt").unlink()
    assert evaluate_checkpoint(tiny.digits(), copy)["step"] == 8
    captured = capsys.readouterr()
    assert "the checkpoint of update 12" in captured.err and not captured.out
    with pytest.raises(UserError, match="state/manifest.ocdbt is missing"):
        evaluate_checkpoint(tiny.digits(), copy, step=12)
