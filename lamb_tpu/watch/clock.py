"""Wall time of a run, added up over its starts."""

import time

from lamb_tpu.store.position import Position


class Clock:
    """Seconds of training, evaluation and saving, and separately those of start-up.

    Neither includes the time between two starts, or the time of updates that a killed start had
    not saved.

    Args:
      position: position in the checkpoint from which the start resumes.
      began: `time.monotonic()` when this start began.
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
        """Seconds of start-up of this start."""
        return self._start - self._began

    @property
    def startup(self) -> float:
        """Seconds of start-up of all starts together."""
        return self._position.startup + self.startup_of_this_start

    def times(self) -> dict[str, float]:
        """Returns `seconds`, `seconds_with_startup` and `starts`."""
        # Read once, so that the two numbers differ by the start-up time exactly.
        seconds = self.seconds
        return {
            "seconds": seconds,
            "seconds_with_startup": seconds + self.startup,
            "starts": self.starts,
        }
