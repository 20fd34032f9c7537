"""How fast a run trains, from log to log."""

import contextlib
import time
from collections.abc import Iterator, Mapping


class Throughput:
    """Rates of the updates between two readings.

    The first update of a start, which waits for the compiler, is outside, as is what is `paused`.

    Args:
      amounts: by the name of a rate, what one update adds to it.
    """

    def __init__(self, amounts: Mapping[str, float]) -> None:
        self._amounts = amounts
        self._start: tuple[int, float] | None = None

    def start(self, step: int) -> None:
        """Starts the clock; `step` updates are complete."""
        self._start = (step, time.monotonic())

    def read(self, step: int) -> dict[str, float]:
        """The amounts a second since `start` or the last reading, and starts anew.

        Args:
          step: completed updates; none may be under way.

        Returns:
          A rate for each amount; nothing where no update is in the time.
        """
        if self._start is None:
            return {}
        first, began = self._start
        updates, seconds = step - first, time.monotonic() - began
        self.start(step)
        if not updates or seconds <= 0:
            return {}
        return {name: amount * updates / seconds for name, amount in self._amounts.items()}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time inside the block out."""
        before = time.monotonic()
        yield
        if self._start is not None:
            step, began = self._start
            self._start = (step, began + time.monotonic() - before)
