"""A line with the progress is printed for each run that is being trained."""

import pathlib
import re

import pytest

from lamb_tpu.reproduce import engine, watching
from tests.reproduce.papers import setup, write
from tests.reproduce.test_results import job_of


def test_lines(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    job, where = job_of(table), setup(tmp_path)
    watch = watching.Watch(where, 1)
    assert watch.lines() == []
    watch.begun(job)
    (line,) = watch.lines()
    assert re.fullmatch(r"  lamb-small-seed0: nothing recorded yet, 0:0\d so far", line)
    engine.execute(job, where)
    (line,) = watch.lines()
    assert re.fullmatch(
        r"  lamb-small-seed0: update 4, epoch 0.\d+, loss \d\.\d+, 0:\d\d so far", line
    )
    watch.done(job)
    assert watch.lines() == []


def test_they_are_printed_while_runs_go_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "_SECONDS_BETWEEN_LINES", 0.01)
    with watching.Watch(setup(tmp_path), 2) as watch:
        watch.begun(job_of(write(tmp_path)))
        while "nothing recorded yet" not in capsys.readouterr().out:
            pass
    watch._thread.join(timeout=10)
    assert not watch._thread.is_alive()
