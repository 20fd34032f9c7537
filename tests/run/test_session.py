"""A run's hold on its folder, its checkpoints and its process."""

import os
import pathlib
import signal

import pytest

from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.run.session import Session
from lamb_tpu.store.position import Position
from tests import tiny


def session(workdir: pathlib.Path, **changes: object) -> Session:
    return Session(prepare(tiny.digits(**changes), workdir), lambda step: step == 1, print)


def test_saved_is_restored(tmp_path: pathlib.Path) -> None:
    with session(tmp_path, checkpoint__keep=1) as one:
        state, position = one.restore()
        one.open_records(0, position, is_over=False).close()
        assert not one.resumed and position == Position()
        assert one.last_checkpoint() == "not yet written"
        for step in (1, 2, 3):
            one.save(step, state.replace(step=state.step + step), Position(loader={}, starts=step))
        one.finish()
        assert one.saved_step == 3
        assert one.last_checkpoint() == str(tmp_path / "checkpoints" / "3")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "3"}
    with session(tmp_path, checkpoint__keep=1) as again:
        found, position = again.restore()
        assert again.resumed and again.saved_step == 3
        # The session records how many updates the run has.
        assert position == Position({}, starts=3, total_steps=12)
        tiny.assert_equal(found.params, state.params)


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
        one.fail(UserError("the disk is full"))
        with pytest.raises(UserError, match="the disk is full"):
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
        with one.open_records(0, Position(), is_over=False) as records:
            records.write(1, "train", {"loss": 1.0})
            records.write(2, "train", {"loss": 1.0})
        one.open_records(1, Position(), is_over=True).close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1  # of the start that trains
