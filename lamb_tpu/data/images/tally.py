"""What was met among the pictures that is out of the ordinary: counted, and named where it is bad.

A set of a million pictures is not looked through before a run, so this comes to light in the course
of it. What had to be left out is told at once, through Python's `logging`, so that it reaches the
terminal of whichever process has read it; the counts are told at the end of a run.
"""

import logging
import threading

# Kind of picture -> what it is called.
KINDS = {"grey": "grey", "cmyk": "CMYK", "png": "PNG", "bad": "bad"}
_NAMED = 20  # bad records told one by one; of further ones only their number, at each doubling
_LOGGER = logging.getLogger(__name__)


class Tally:
    """Counts of examples by kind, each example once; several threads may count at once.

    Args:
      source: what the set is called.
      training: whether it is trained on, so that the next example takes the place of a bad record;
        in evaluation nothing does.
    """

    def __init__(self, source: str, training: bool = True) -> None:
        self._source = source
        self._training = training
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
        """Counts a bad record that is left out, and tells it."""
        count = self.add("bad", index)
        consequence = "the next one stands in for it" if self._training else "does not count"
        if 0 < count <= _NAMED:
            _LOGGER.warning(
                "data set %s: %s is left out, and %s: %s (%d so far)",
                self._source, name, consequence, reason, count,
            )
        elif count and count & (count - 1) == 0:
            _LOGGER.warning("data set %s: %d records are left out", self._source, count)

    def counts(self) -> dict[str, int]:
        """Kind -> number of examples met so far, of the `KINDS` that were met."""
        with self._lock:
            return {kind: len(self._found[kind]) for kind in KINDS if kind in self._found}

    def describe(self) -> str:
        """The counts as a line for the terminal; '' where there are none."""
        counts = self.counts()
        if not counts:
            return ""
        listed = ", ".join(f"{count:,} {KINDS[kind]}" for kind, count in counts.items())
        left_out = ", and the bad ones were left out" if "bad" in counts else ""
        use = "training" if self._training else "evaluation"
        return f"data set {self._source}: of the pictures read in {use} {listed}{left_out}"
