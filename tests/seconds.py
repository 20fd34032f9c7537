"""Pytest hooks for the rule that a test takes under 5 s or is marked long.

A test's time is the CPU time of its process and of the child processes that it waited for, without
fixtures. Other work on the machine also increases this time, so it is divided by `slowdown()`, which
times a fixed computation just after the test. A test over 5 s is reported. A test over 30 s fails;
the limit is so high because times on a small machine vary.
"""

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests import commands

LIMIT = 5.0
TOLERANCE = 6.0  # a test that runs alone compiles programs that earlier tests would have compiled
REFERENCE = 0.12  # seconds of `_computation` on the reference machine
_PROPERTY = "processor_seconds"


def used() -> float:
    """Returns the CPU seconds of this process and of the commands that it waited for."""
    times = os.times()
    children = times.children_user + times.children_system + commands.spent
    return times.user + times.system + children


def slowdown() -> float:
    """Returns how many times slower than the reference this machine is now, at least 1."""
    began = time.thread_time()
    _computation()
    return max(1.0, (time.thread_time() - began) / REFERENCE)


def _computation() -> None:
    """Builds and reads trees of Python objects, as JAX does when it traces a function."""
    text = json.dumps([{str(number): [number] * 8 for number in range(100)} for _ in range(80)])
    for _ in range(20):
        json.loads(text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = used()
    yield
    seconds = used() - before
    if seconds <= LIMIT or item.get_closest_marker("long"):
        return
    seconds /= slowdown()
    if seconds > LIMIT * TOLERANCE:
        pytest.fail(
            f"{seconds:.1f} processor seconds, over {LIMIT * TOLERANCE:g}: make the test shorter or "
            "mark it long",
            pytrace=False,
        )
    if seconds > LIMIT:
        item.user_properties.append((_PROPERTY, seconds))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists the passed tests over the time limit, including tests in worker processes."""
    slow = [
        (seconds, report.nodeid)
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, seconds in report.user_properties
        if name == _PROPERTY
    ]
    if slow:
        terminalreporter.section(f"over {LIMIT:g} processor seconds: shorten or mark long")
        for seconds, name in sorted(slow, reverse=True):
            terminalreporter.write_line(f"{seconds:6.1f} s {name}")
