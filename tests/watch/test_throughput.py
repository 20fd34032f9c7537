"""Rates from log to log, with what is not training left out."""

import pytest

from lamb_tpu.watch import throughput as throughput_lib
from lamb_tpu.watch.throughput import Throughput


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(throughput_lib.time, "monotonic", lambda: now[0])
    return now


def test_rates_are_of_the_updates_since_the_last_reading(clock: list[float]) -> None:
    throughput = Throughput({"examples_per_second": 64, "mfu": 0.5})
    clock[0] += 30
    throughput.start(11)
    clock[0] += 2
    assert throughput.read(16) == {"examples_per_second": 160.0, "mfu": 1.25}
    clock[0] += 8
    assert throughput.read(18) == {"examples_per_second": 16.0, "mfu": 0.125}


def test_pauses_do_not_count(clock: list[float]) -> None:
    throughput = Throughput({"tokens_per_second": 1000})
    with throughput.paused():  # before the first update, as where a resumed run evaluates first
        clock[0] += 5
    throughput.start(1)
    clock[0] += 1
    for seconds in (10, 20):
        with throughput.paused():
            clock[0] += seconds
    clock[0] += 1
    assert throughput.read(3) == {"tokens_per_second": 1000.0}
    clock[0] += 4
    assert throughput.read(4) == {"tokens_per_second": 250.0}


def test_nothing_where_no_update_was_timed(clock: list[float]) -> None:
    throughput = Throughput({"examples_per_second": 64})
    assert throughput.read(1) == {}
    throughput.start(1)
    clock[0] += 1
    assert throughput.read(1) == {}
    assert throughput.read(2) == {}  # in no time at all
