"""Rates of training between records, such as examples a second."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from lamb_tpu.parallel.state import TrainState
from lamb_tpu.watch.observer import Observer, Record, Start


class Throughput(Observer):
    """Rates of the updates since the last record, such as examples a second.

    The first update of a start, which waits for the compiler, does not count; nor do evaluations
    and saves.

    Args:
      amounts: name of each rate -> the amount of one update of the base batch.
      place: returns a number of updates in updates of the base batch, see `Recipe.place`.
    """

    def __init__(
        self, amounts: Mapping[str, float], place: Callable[[int], float] = lambda step: step
    ) -> None:
        self._amounts, self._place = amounts, place
        self._since: tuple[int, float] | None = None

    def started(self, start: Start) -> None:
        self._first = start.step + 1

    def updated(self, step: int, state: TrainState) -> None:
        # Later updates are only started when this hook is called, so they cannot be timed here.
        if step == self._first:
            self._since = (step, time.monotonic())

    def recorded(self, record: Record) -> None:
        """Adds the rates since the last record; none if no update was timed."""
        if self._since is None:
            return
        first, began = self._since
        ended = time.monotonic()
        updates, seconds = self._place(record.step) - self._place(first), ended - began
        self._since = (record.step, ended)
        if not updates or seconds <= 0:
            return
        rates = {name: amount * updates / seconds for name, amount in self._amounts.items()}
        # MFU is shown to the user; the other rates are only written.
        if "mfu" in rates:
            record.values["mfu"] = rates.pop("mfu")
        record.rates |= rates

    @contextlib.contextmanager
    def paused(self, step: int, reason: str) -> Iterator[None]:
        """Excludes the time inside the block."""
        before = time.monotonic()
        yield
        if self._since is not None:
            first, began = self._since
            # As if the updates before the pause had begun later by its length.
            self._since = (first, began + time.monotonic() - before)
