"""The time that a run takes, added up over its starts."""

import time

from lamb_tpu.store.position import Position


class Clock:
    """Seconds of training, evaluation and saving, and apart from them of starting up.

    The time between two starts is in neither, nor is that of updates which a killed start had not
    saved.

    Args:
      position: of the checkpoint that the start resumes from.
      began: `time.monotonic()` when this start began.
    """

    def __init__(self, position: Position, began: float) -> None:
        self._position, self._began = position, began
        self._start = time.monotonic()
        self.starts = position.starts + 1

    def start(self) -> None:
        """Starts the clock of `seconds`; what was before is start-up."""
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training, evaluation and saving, without starting up."""
        return self._position.seconds + time.monotonic() - self._start

    @property
    def since_began(self) -> float:
        """Seconds since this start began, start-up and all."""
        return time.monotonic() - self._began

    @property
    def startup_of_this_start(self) -> float:
        """Seconds from the beginning of this start to `start`."""
        return self._start - self._began

    @property
    def startup(self) -> float:
        """The same of all starts together."""
        return self._position.startup + self.startup_of_this_start

    def times(self) -> dict[str, float]:
        """Returns `seconds`, `seconds_with_startup` and `starts`."""
        seconds = self.seconds
        return {
            "seconds": seconds, "seconds_with_startup": seconds + self.startup,
            "starts": self.starts,
        }
