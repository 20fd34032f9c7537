"""Shrinks a failing case: removes features one by one while it still fails."""

import time
from collections.abc import Callable, Iterator

from tests.fuzz.case import Case


def smaller(case: Case) -> Iterator[Case]:
    """Yields cases with one feature less, the largest reductions first."""
    if len(case.first) < len(case.second):
        yield Case(case.family, case.config, case.first, case.first)
    if len(case.second) < len(case.first):
        yield Case(case.family, case.config, case.second, case.second)
    for setting in ("first", "second"):
        if getattr(case, setting):
            legs = {"first": case.first, "second": case.second, setting: {}}
            yield Case(case.family, case.config, **legs)
    if case.family != "mlp":
        config = {k: v for k, v in case.config.items() if not k.startswith("model.")}
        yield Case("mlp", config, case.first, case.second)
    for field in ("config", "first", "second"):
        given = getattr(case, field)
        for key in given:
            legs = {"config": case.config, "first": case.first, "second": case.second}
            legs[field] = {k: v for k, v in given.items() if k != key}
            yield Case(case.family, **legs)
    optimizer = case.config.get("optimizer", {})
    for key in optimizer:
        if key not in ("name", "learning_rate", "rules"):
            fewer = {k: v for k, v in optimizer.items() if k != key}
            yield Case(case.family, {**case.config, "optimizer": fewer}, case.first, case.second)


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float) -> Case:
    """Returns a case that fails and from which no single feature can be removed, if time permits."""
    end, tried = time.monotonic() + seconds, {case.to_json()}
    while True:
        for candidate in smaller(case):
            if time.monotonic() > end:
                return case
            text = candidate.to_json()
            if text not in tried and not tried.add(text) and fails(candidate):
                case = candidate
                break
        else:
            return case
