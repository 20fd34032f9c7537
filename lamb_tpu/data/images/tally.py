"""What was met among the pictures that is out of the ordinary: counted, and named where it is bad.

A set of a million pictures is not looked through before a run, so this comes to light in the course
of it. What had to be left out is told at once, through Python's `logging`, so that it reaches the
terminal of whichever process has read it.
"""

import logging
import threading

_NAMED = 20  # bad records told one by one; of further ones only their number, at each doubling
_LOGGER = logging.getLogger(__name__)


class Tally:
    """Counts of examples by kind, each example once; several threads may count at once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._found: dict[str, set[int]] = {}

    def add(self, kind: str, index: int) -> int:
        """Counts an example; returns how many there are of its kind, 0 if it was known."""
        with self._lock:
            found = self._found.setdefault(kind, set())
            if index in found:
                return 0
            found.add(index)
            return len(found)

    def skip(self, index: int, name: str, reason: str) -> None:
        """Counts a bad record that another one stands in for, and tells it."""
        count = self.add("bad", index)
        if 0 < count <= _NAMED:
            _LOGGER.warning(
                "data set %s: %s is left out, and the next one stands in for it: %s (%d so far)",
                self._source, name, reason, count,
            )
        elif count and count & (count - 1) == 0:
            _LOGGER.warning("data set %s: %d records are left out", self._source, count)

    def counts(self) -> dict[str, int]:
        """Kind -> number of examples met so far: `grey`, `cmyk`, `png`, `bad`."""
        with self._lock:
            return {kind: len(found) for kind, found in sorted(self._found.items())}
