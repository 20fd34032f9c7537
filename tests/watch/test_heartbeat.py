"""Periodic progress lines of all processes except the first."""

import re
import time

import jax
import pytest

from lamb_tpu.watch.heartbeat import Heartbeat
from tests.watch.observing import start


def beat(seconds: float, monkeypatch: pytest.MonkeyPatch, index: int) -> float:
    """Simulates 50 updates of process `index`; returns how many seconds they took (0.5 or more)."""
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    began, heartbeat = time.monotonic(), Heartbeat(seconds)
    heartbeat.started(start(100))
    for step in range(101, 151):
        time.sleep(0.01)
        heartbeat.updated(step, None)
    heartbeat.ended()
    took = time.monotonic() - began
    time.sleep(0.3)  # no lines may follow
    return took


def test_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    took = beat(0.2, monkeypatch, index=3)
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= took / 0.2
    actual = re.fullmatch(
        r"process 3 of 8 on \S+: update (\d+), ([\d.]+) updates/s, ([\d.]+) GiB resident", lines[0]
    )
    assert 100 < int(actual[1]) <= 150 and 10 < float(actual[2]) <= 100
    assert 0.05 < float(actual[3]) < 100


@pytest.mark.parametrize("seconds, index", [(0.0, 3), (0.1, 0)])
def test_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, seconds: float, index: int
) -> None:
    beat(seconds, monkeypatch, index)
    assert capsys.readouterr().out == ""
