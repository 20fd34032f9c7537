"""Throughput of training between records, such as examples per second."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from lamb_tpu.parallel.state import TrainState
from lamb_tpu.watch.observer import Observer, Record, Start


class Throughput(Observer):
    """Measures rates since the previous record, without evaluations, saves and a process's first update.

    Args:
      amounts: name of each rate -> the amount in one update of the base batch.
      place: converts a number of updates to updates of the base batch, see `Recipe.place`.
    """

    def __init__(
        self, amounts: Mapping[str, float], place: Callable[[int], float] = lambda step: step
    ) -> None:
        self._amounts, self._place = amounts, place
        self._since: tuple[int, float] | None = None

    def started(self, start: Start) -> None:
        self._first = start.step + 1

    def updated(self, step: int, state: TrainState) -> None:
        # Later updates are only dispatched at this time, so they cannot be timed here.
        if step == self._first:
            self._since = (step, time.monotonic())

    def recorded(self, record: Record) -> None:
        """Adds the rates since the previous record; adds none if no update was timed."""
        if self._since is None:
            return
        first, began = self._since
        ended = time.monotonic()
        updates, seconds = self._place(record.step) - self._place(first), ended - began
        self._since = (record.step, ended)
        if not updates or seconds <= 0:
            return
        rates = {name: amount * updates / seconds for name, amount in self._amounts.items()}
        # MFU is also shown to the user; other rates are only written.
        if "mfu" in rates:
            record.values["mfu"] = rates.pop("mfu")
        record.rates |= rates

    @contextlib.contextmanager
    def paused(self, step: int, reason: str) -> Iterator[None]:
        """Excludes the time of the block."""
        before = time.monotonic()
        yield
        if self._since is not None:
            first, began = self._since
            # Shift the beginning of the interval by the length of the pause.
            self._since = (first, began + time.monotonic() - before)
