"""Wall time of a run, summed over its start and its resumptions."""

import time

from lamb_tpu.store.position import Position


class Clock:
    """Measures the time of training, evaluation and saving and, separately, the time of start-up.

    Each resumption of a run counts as another start. Neither time includes the pauses between
    starts, or updates that were not saved before their process was killed. `position` comes from
    the checkpoint that is resumed; `began` is `time.monotonic()` when this start began.
    """

    def __init__(self, position: Position, began: float) -> None:
        self._position, self._began = position, began
        self._start = time.monotonic()
        self.starts = position.starts + 1

    def start(self) -> None:
        """Starts the clock of `seconds`; the time before this call is start-up."""
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training, evaluation and saving over all starts, without start-up."""
        return self._position.seconds + time.monotonic() - self._start

    @property
    def since_began(self) -> float:
        """Seconds since this start began, including start-up."""
        return time.monotonic() - self._began

    @property
    def startup_of_this_start(self) -> float:
        """Seconds that start-up took in this start."""
        return self._start - self._began

    @property
    def startup(self) -> float:
        """Seconds that start-up took in all starts together."""
        return self._position.startup + self.startup_of_this_start

    def times(self) -> dict[str, float]:
        # Read the clock once, so that the two times differ by exactly the start-up time.
        seconds = self.seconds
        return {
            "seconds": seconds,
            "seconds_with_startup": seconds + self.startup,
            "starts": self.starts,
        }
