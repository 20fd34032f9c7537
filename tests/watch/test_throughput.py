"""Throughput between records, without the time of evaluations and saves."""

import pytest

from lamb_tpu.watch import throughput as throughput_lib
from lamb_tpu.watch.throughput import Throughput
from tests.watch.observing import record, start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(throughput_lib.time, "monotonic", lambda: now[0])
    return now


def started(amounts: dict[str, float], step: int = 0) -> Throughput:
    throughput = Throughput(amounts)
    throughput.started(start(step))
    return throughput


def read(throughput: Throughput, step: int) -> dict[str, float]:
    actual = record(step)
    throughput.recorded(actual)
    return actual.values | actual.rates


def test_rates_since_the_last_record(clock: list[float]) -> None:
    throughput = started({"examples_per_second": 64, "mfu": 0.5}, step=10)
    clock[0] += 30
    throughput.updated(11, None)
    for step in range(12, 17):
        clock[0] += 0.5
        throughput.updated(step, None)
    actual = record(16)
    throughput.recorded(actual)
    assert (actual.values, actual.rates) == ({"mfu": 1.0}, {"examples_per_second": 128.0})
    clock[0] += 8
    assert read(throughput, 18) == {"examples_per_second": 16.0, "mfu": 0.125}


def test_rates_of_a_changing_batch(clock: list[float]) -> None:
    """The first four updates have 32 examples each, later ones 128; the base batch size is 64."""
    throughput = Throughput(
        {"examples_per_second": 64}, lambda step: (32 * min(step, 4) + 128 * max(step - 4, 0)) / 64
    )
    throughput.started(start(0))
    throughput.updated(1, None)
    for step, expected in [(2, 16.0), (4, 32.0), (5, 64.0), (7, 128.0)]:
        clock[0] += 2
        assert read(throughput, step) == {"examples_per_second": expected}


def test_pauses_do_not_count(clock: list[float]) -> None:
    throughput = started({"tokens_per_second": 1000})
    with throughput.paused(0, "evaluation"):  # a resumed run may begin with an evaluation
        clock[0] += 5
    throughput.updated(1, None)
    clock[0] += 1
    for seconds, reason in ((10, "evaluation"), (20, "save")):
        with throughput.paused(2, reason):
            clock[0] += seconds
    clock[0] += 1
    assert read(throughput, 3) == {"tokens_per_second": 1000.0}
    clock[0] += 4
    assert read(throughput, 4) == {"tokens_per_second": 250.0}


def test_no_rates_without_a_timed_update(clock: list[float]) -> None:
    throughput = started({"examples_per_second": 64})
    assert read(throughput, 1) == {}
    throughput.updated(1, None)
    clock[0] += 1
    assert read(throughput, 1) == {}
    assert read(throughput, 2) == {}  # no time has passed
