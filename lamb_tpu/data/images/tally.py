"""Counts of odd and damaged pictures that are read in a run.

A set of a million pictures is not checked before a run, so these are found while it runs. Skipped
records are reported at once, through Python's `logging`, so that the message reaches the terminal
of the process that read them. The counts are reported at the end of a run.
"""

import logging
import threading

# Kind of picture -> what it is called.
KINDS = {
    "grey": "grey",
    "cmyk": "CMYK",
    "png": "PNG",
    "webp": "WebP",
    "bmp": "BMP",
    "animated": "animated (the first image is read)",
    "rotated": "with an EXIF rotation tag (which is ignored)",
    "bad": "bad",
}
_NAMED = 20  # bad records reported by name; after that only their number, at each doubling
_LOGGER = logging.getLogger(__name__)


class Tally:
    """Counts of examples by kind, each example once; several threads may count at once.

    Args:
      source: name of the set, for messages.
      training: whether the next example replaces a bad record, as in training.
    """

    def __init__(self, source: str, training: bool = True) -> None:
        self._source = source
        self._training = training
        self._lock = threading.Lock()
        # Indices and not counts, because a run reads the same example in every epoch.
        self._found: dict[str, set[int]] = {}

    def add(self, kind: str, index: int) -> int:
        """Counts an example; returns the count of its kind, or 0 if it was counted before."""
        with self._lock:
            found = self._found.setdefault(kind, set())
            if index in found:
                return 0
            found.add(index)
            return len(found)

    def skip(self, index: int, name: str, reason: str) -> None:
        """Counts and reports a bad record that is skipped."""
        count = self.add("bad", index)
        consequence = "the next one stands in for it" if self._training else "does not count"
        if 0 < count <= _NAMED:
            _LOGGER.warning(
                "data set %s: %s is left out, and %s: %s (%d so far)",
                self._source,
                name,
                consequence,
                reason,
                count,
            )
        # True at each power of two.
        elif count and count & (count - 1) == 0:
            _LOGGER.warning("data set %s: %d records are left out", self._source, count)

    def counts(self) -> dict[str, int]:
        """Returns kind -> number of examples so far, for the `KINDS` that occurred."""
        with self._lock:
            return {kind: len(self._found[kind]) for kind in KINDS if kind in self._found}

    def describe(self) -> str:
        """Returns the counts as a line for the terminal; '' if there are none."""
        counts = self.counts()
        if not counts:
            return ""
        listed = ", ".join(f"{count:,} {KINDS[kind]}" for kind, count in counts.items())
        left_out = ", and the bad ones were left out" if "bad" in counts else ""
        use = "training" if self._training else "evaluation"
        return f"data set {self._source}: of the pictures read in {use} {listed}{left_out}"
