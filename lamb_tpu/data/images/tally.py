"""Counts of unusual and damaged images that a run has read.

A set of a million images is not checked before a run, so bad images are detected during the run.
Skipped records are reported at once, through Python's `logging`, on the terminal of the process
that read them. The counts are reported at the end of a run.
"""

import logging
import threading

from lamb_tpu.errors import printable

# Kind of image -> its name in messages.
TYPES = {
    "grey": "grey",
    "cmyk": "CMYK",
    "png": "PNG",
    "webp": "WebP",
    "bmp": "BMP",
    "animated": "animated (the first image is read)",
    "rotated": "with an EXIF rotation tag (which is ignored)",
    "bad": "bad",
}
_NAMED = 20  # bad records reported by name; after these, only each doubling of their number is
_LOGGER = logging.getLogger(__name__)


class Tally:
    """Counts of examples by kind, each example once per kind; thread-safe. `source` is the set's name."""

    def __init__(self, source: str, training: bool = True) -> None:
        self._source = source
        self._training = training
        self._lock = threading.Lock()
        # Sets of indices, because a run reads the same example in every epoch.
        self._indices: dict[str, set[int]] = {}

    def add(self, kind: str, index: int) -> int:
        """Counts an example; returns the count of its kind, or 0 if it was counted before."""
        with self._lock:
            indices = self._indices.setdefault(kind, set())
            if index in indices:
                return 0
            indices.add(index)
            return len(indices)

    def skip(self, index: int, name: str, reason: str) -> None:
        """Counts and reports a bad record that is skipped."""
        count = self.add("bad", index)
        consequence = "the next good record replaces it" if self._training else "does not count"
        if 0 < count <= _NAMED:
            _LOGGER.warning(
                "data set %s: %s is left out, and %s: %s (%d so far)",
                self._source,
                printable(name),
                consequence,
                printable(reason),
                count,
            )
        # True at each power of two.
        elif count and count & (count - 1) == 0:
            _LOGGER.warning("data set %s: %d records are left out", self._source, count)

    def counts(self) -> dict[str, int]:
        """Returns kind -> number of examples so far, for the `TYPES` that occurred."""
        with self._lock:
            return {kind: len(self._indices[kind]) for kind in TYPES if kind in self._indices}

    def describe(self) -> str:
        """Returns the counts as a line for the terminal; '' if there are none."""
        counts = self.counts()
        if not counts:
            return ""
        listed = ", ".join(f"{count:,} {TYPES[kind]}" for kind, count in counts.items())
        left_out = ", and the bad ones were left out" if "bad" in counts else ""
        use = "training" if self._training else "evaluation"
        return f"data set {self._source}: images read in {use} include {listed}{left_out}"
