"""Hooks are called in order, and only those that an observer overrides between updates."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from lamb_tpu.watch.observer import Observer, Observers
from tests.watch.observing import record, start


class Told(Observer):
    """Tells which of its hooks are called."""

    def __init__(self, name: str, told: list[str], **attributes: Any) -> None:
        self.name, self._told = name, told
        for key, value in attributes.items():
            setattr(self, key, value)

    def _tell(self, hook: str) -> None:
        self._told.append(f"{self.name} {hook}")

    def started(self, start: Any) -> None:
        self._tell("started")
        if getattr(self, "breaks", False):
            raise ValueError

    def updated(self, step: int, state: Any) -> None:
        self._tell(f"updated {step}")

    def recorded(self, record: Any) -> None:
        record.values[self.name] = len(record.values)

    @contextlib.contextmanager
    def paused(self, step: int, reason: str) -> Iterator[None]:
        self._tell(f"{reason} begins")
        yield
        self._tell(f"{reason} ends")

    def ended(self) -> None:
        self._tell("ended")

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
        self._tell(f"restored {state}")


def test_hooks_are_called_in_order() -> None:
    told: list[str] = []
    observers = Observers([Told("a", told), Observer(), Told("b", told)])
    with observers.watching(start()):
        observers.updating(0)
        observers.updated(1, None)
        with observers.paused(1, "save"):
            pass
    assert told == [
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


def test_those_that_have_started_are_ended() -> None:
    told: list[str] = []
    observers = Observers([Told("a", told), Told("b", told, breaks=True), Told("c", told)])
    with pytest.raises(ValueError), observers.watching(start()):
        pass
    assert told == ["a started", "b started", "a ended"]


def test_what_they_say_together() -> None:
    told: list[str] = []
    plain = Observers([Observer()])
    assert (plain.may_end_run, plain.saves_evaluations, plain.end_reason) == (False, False, "")
    assert plain.summary() == "" and plain.state() == {} and not plain.keep(4)
    observers = Observers(
        [
            Told("a", told, may_end_run=True),
            Told("b", told, reason="enough"),
            Told("c", told, saves_evaluations=True),
        ]
    )
    assert observers.may_end_run and observers.saves_evaluations
    assert observers.end_reason == "enough" and observers.summary() == "A; C"
    assert observers.keep(4) and not observers.keep(5)


def test_states_are_kept_by_name() -> None:
    told: list[str] = []
    observers = Observers([Told("a", told), Observer(), Told("b", told)])
    assert observers.state() == {"a": {"of": "a"}, "b": {"of": "b"}}
    observers.restore({"a": 1, "gone": 2})  # b is new since the checkpoint
    assert told == ["a restored 1"]
