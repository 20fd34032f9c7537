"""`Start` and `Record` objects, with which tests call observers without a trainer."""

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from lamb_tpu.store.position import Position
from lamb_tpu.watch.clock import Clock
from lamb_tpu.watch.observer import Record, Start


class RecordList:
    """Replaces MetricsWriter and collects the records in a list."""

    def __init__(self) -> None:
        self.actual: list[dict[str, Any]] = []
        self.is_closed = False
        self.missing: dict[str, int] = {}

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        self.actual.append({"step": step, "kind": kind, **values})

    def close(self) -> None:
        self.is_closed = True


def start(step: int = 0, skipped: int = 0, **changes: Any) -> Start:
    settings = {
        "state": SimpleNamespace(skipped=skipped, opt_state=()),
        "is_over": False,
        "eval_due": False,
        "clock": Clock(Position(), time.monotonic()),
        "records": RecordList(),
        "last_checkpoint": lambda: "runs/x/40",
        "fail": None,
    }
    return Start(step, **settings | changes)


def record(step: int, values: Mapping[str, float] | None = None, state: Any = None) -> Record:
    return Record(step, 1, state, dict(values or {}))
