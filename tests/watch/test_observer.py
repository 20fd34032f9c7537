"""Tests the order in which hooks are called, and that only overridden hooks are called."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from lamb_tpu.watch.observer import Observer, Observers
from tests.watch.observing import record, start


class Logged(Observer):
    """Logs the calls of its hooks."""

    def __init__(self, name: str, output: list[str], **attributes: Any) -> None:
        self.name, self._output = name, output
        for key, value in attributes.items():
            setattr(self, key, value)

    def _log(self, hook: str) -> None:
        self._output.append(f"{self.name} {hook}")

    def started(self, start: Any) -> None:
        self._log("started")
        if getattr(self, "breaks", False):
            raise ValueError

    def updated(self, step: int, state: Any) -> None:
        self._log(f"updated {step}")

    def recorded(self, record: Any) -> None:
        record.values[self.name] = len(record.values)

    @contextlib.contextmanager
    def paused(self, step: int, reason: str) -> Iterator[None]:
        self._log(f"{reason} begins")
        yield
        self._log(f"{reason} ends")

    def ended(self) -> None:
        self._log("ended")

    @property
    def end_reason(self) -> str:
        return getattr(self, "reason", "")

    def summary(self) -> str:
        return self.name.upper() if self.name != "b" else ""

    def keeps(self, step: int) -> bool:
        return self.name == "b" and step == 4

    def state(self) -> Any:
        return {"of": self.name}

    def restore(self, state: Any) -> None:
        self._log(f"restored {state}")


def test_hooks_are_called_in_order() -> None:
    output: list[str] = []
    observers = Observers([Logged("a", output), Observer(), Logged("b", output)])
    with observers.watching(start()):
        observers.updating(0)
        observers.updated(1, None)
        with observers.paused(1, "save"):
            pass
    assert output == [
        "a started",
        "b started",
        "a updated 1",
        "b updated 1",
        "a save begins",
        "b save begins",
        "b save ends",
        "a save ends",
        "b ended",
        "a ended",
    ]
    one = record(1)
    observers.recorded(one)
    assert one.values == {"a": 0, "b": 1}


def test_started_observers_are_ended() -> None:
    output: list[str] = []
    observers = Observers(
        [Logged("a", output), Logged("b", output, breaks=True), Logged("c", output)]
    )
    with pytest.raises(ValueError), observers.watching(start()):
        pass
    assert output == ["a started", "b started", "a ended"]


def test_combined_properties() -> None:
    output: list[str] = []
    plain = Observers([Observer()])
    assert (plain.may_end_run, plain.saves_evaluations, plain.end_reason) == (False, False, "")
    assert plain.summary() == "" and plain.state() == {} and not plain.keep(4)
    observers = Observers(
        [
            Logged("a", output, may_end_run=True),
            Logged("b", output, reason="enough"),
            Logged("c", output, saves_evaluations=True),
        ]
    )
    assert observers.may_end_run and observers.saves_evaluations
    assert observers.end_reason == "enough" and observers.summary() == "A; C"
    assert observers.keep(4) and not observers.keep(5)


def test_states_by_name() -> None:
    output: list[str] = []
    observers = Observers([Logged("a", output), Observer(), Logged("b", output)])
    assert observers.state() == {"a": {"of": "a"}, "b": {"of": "b"}}
    observers.restore({"a": 1, "gone": 2})  # the checkpoint has no observer b
    assert output == ["a restored 1"]
