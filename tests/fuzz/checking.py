"""Checks a rejection: before anything compiles, one sentence, and the same in any order of the keys."""

import re
from typing import Any, NamedTuple

import jax

from lamb_tpu.errors import UserError
from tests.fuzz.case import Case, num_devices
from tests.fuzz.running import prepared

MOST_COMPILED = 2
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compiles:
    """Counts the programs that this process compiles."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **labels: Any) -> None:
        self.count += event == _COMPILED


class Rejection(NamedTuple):
    """The error that rejects a leg, and the number of programs that were compiled before it."""

    error: UserError
    compiled: int


def rejection(case: Case, compiles: Compiles | None = None) -> Rejection | None:
    """Returns the rejection of one of the legs; None if both are accepted."""
    for config, setting in zip(case.legs(), (case.first, case.second)):
        before = compiles.count if compiles else 0
        try:
            prepared(config, num_devices(setting))
        except UserError as error:
            return Rejection(error, compiles.count - before if compiles else 0)
    return None


def backwards(case: Case) -> Case:
    """Returns the case with its keys in the reverse order."""
    legs = (case.config, case.first, case.second)
    return Case(case.family, *(dict(reversed(leg.items())) for leg in legs))


def problems(case: Case, rejected: Rejection) -> list[str]:
    """Returns what is wrong with a rejection."""
    found, (error, compiled) = [], rejected
    text = str(error)
    # The random key of `eval_shape` and the first value of a schedule are programs of a few lines.
    if compiled > MOST_COMPILED:
        found.append(f"{compiled} programs were compiled before the rejection")
    if "\n" in text or re.search(r"[a-z)]\. [A-Z]", text):
        found.append("the rejection is not one sentence")
    if not (error.key and error.problem):
        found.append("the rejection lacks a key or a problem")
    again = rejection(backwards(case))
    if again is None or str(again.error) != text:
        found.append(f"in the reverse order of the keys the rejection is {again}")
    return [f"{each}: {text}" for each in found]
