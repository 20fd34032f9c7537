"""The session of a run: lock, signals, checkpoints and records."""

import os
import pathlib
import signal
from typing import Any

import pytest

from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.run.session import Session
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.position import Position
from tests import tiny
from tests.raising import rejected


def session(workdir: pathlib.Path, **changes: object) -> Session:
    run = prepare(tiny.digits(**changes), workdir)
    return Session(run, CurrentRecipe(run.recipe), lambda step: step == 1, print)


def test_saved_is_restored(tmp_path: pathlib.Path) -> None:
    with session(tmp_path, checkpoint__keep=1) as one:
        state, position = one.restore()
        one.open_records(0, position, is_over=False)[0].close()
        assert not one.resumed and position == Position()
        assert one.last_checkpoint() == "not yet written"
        for step in (1, 2, 3):
            one.save(step, state.replace(step=state.step + step), Position(loader={}, starts=step))
        one.finish()
        assert one.saved_step == 3
        assert one.last_checkpoint() == str(tmp_path / "checkpoints" / "3")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "3"}
    with session(tmp_path, checkpoint__keep=1) as again:
        actual, position = again.restore()
        assert again.resumed and again.saved_step == 3
        # The session fills in total_steps, the number of updates of the run.
        assert position == Position({}, starts=3, total_steps=12)
        tiny.assert_equal(actual.params, state.params)


def test_folder_is_held(tmp_path: pathlib.Path) -> None:
    with session(tmp_path):
        with pytest.raises(UserError, match="is in use by another run"), session(tmp_path):
            pass
    with session(tmp_path):
        pass


def test_poll_ends_the_start(tmp_path: pathlib.Path) -> None:
    with session(tmp_path) as one:
        one.poll("nothing")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            one.poll_evaluation()
    with session(tmp_path) as one:
        one.fail(UserError("the disk", problem="is full"))
        with rejected("the disk", problem="is full"):
            one.poll("update 1")


def test_file_that_cannot_be_written_ends_the_start(tmp_path: pathlib.Path) -> None:
    with session(tmp_path) as one:
        one.keep_file("predictions.json", "{}")
        assert (tmp_path / "predictions.json").read_text() == "{}"
        one.keep_file("none/predictions.json", "{}")
        with pytest.raises(UserError, match="none/predictions.json cannot be written"):
            one.finish()


def test_records_of_later_updates_are_removed(tmp_path: pathlib.Path) -> None:
    with session(tmp_path) as one:
        one.restore()
        with one.open_records(0, Position(), is_over=False)[0] as records:
            records.write(1, "train", {"loss": 1.0})
            records.write(2, "train", {"loss": 1.0})
        one.open_records(1, Position(), is_over=True)[0].close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1  # a line per start that trains


def test_records_are_synced_before_a_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, save = os.fsync, Checkpoints.save

    def sync(number: int) -> None:
        done.append(pathlib.Path(os.readlink(f"/proc/self/fd/{number}")).name)
        fsync(number)

    def note_save(checkpoints: Checkpoints, step: int, state: Any, position: Any) -> None:
        done.append("save")
        save(checkpoints, step, state, position)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Checkpoints, "save", note_save)
    with session(tmp_path) as one:
        state, position = one.restore()
        records, _ = one.open_records(0, position, is_over=False)
        records.write(1, "eval", {"loss": 1.0})
        assert "run.jsonl" in done and "metrics.jsonl" not in done
        one.save(1, state.replace(step=state.step + 1), Position(loader={}))
        assert done.index("metrics.jsonl") < done.index("save")
        one.finish()
        records.close()
    with session(tmp_path) as again:
        assert again.restore()[1].records == {"eval": 1}


def test_lost_evaluation_is_due_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output: list[str] = []
    path = tmp_path / "metrics.jsonl"

    def opened(lines: str, **changes: Any) -> bool:
        """Returns whether update 6, at which an evaluation is due, must be evaluated."""
        output.clear()
        path.write_text(lines)
        run = prepare(tiny.digits(), tmp_path)
        with Session(run, CurrentRecipe(run.recipe), lambda step: False, output.append) as one:
            position = Position(records={"train": 1, "eval": 1}, **changes)
            records, eval_due = one.open_records(6, position, is_over=True)
            records.close()
        return eval_due

    train, evaluation = '{"step": 6, "kind": "train"}\n', '{"step": 6, "kind": "eval"}\n'
    assert not opened(train + evaluation) and not output
    assert opened(train + evaluation[:-3])
    assert output == [f"{path} has lost the evaluation of update 6, which is repeated"]
    # Evaluations of earlier updates and other records cannot be repeated.
    assert not opened(evaluation)
    assert output == [
        f"{path} has lost records up to update 6: 1 'train'; restore it from a copy if you have one"
    ]
    assert opened("") and len(output) == 2
    # Checkpoints of older versions lack the number of records.
    assert opened(train + evaluation, eval_due=True)
