"""The path of batches: the batch size of every update of a run, and the examples before it."""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

from lamb_tpu.batching.rules import Rule


class Path:
    """Batch sizes over a run: those decided so far, of which the last stays until the end.

    The run ends with the update that reaches its examples, whose batch is cut to what is left. So
    the batch of every update has an answer at any time, and a further decision changes only those
    behind it. Updates are counted from 0: update t follows t completed ones.

    >>> path = Path(32, total=288)
    >>> path.updates
    9
    >>> path.change(4, 64)
    >>> path.batches().tolist(), [path.examples(step) for step in (0, 4, 5, 7)]
    ([32, 32, 32, 32, 64, 64, 32], [0, 128, 192, 288])

    Args:
      batch: the first batch size, in examples.
      total: examples of the run.

    Attributes:
      total: examples of the run.
      decisions: a number that rises with every change.
    """

    def __init__(self, batch: int, total: int) -> None:
        self.total, self.decisions = total, 0
        # First update, batch size and examples before it of each piece of updates of one size.
        self._firsts, self._sizes, self._before = [0], [batch], [0]

    @property
    def updates(self) -> int:
        """Number of updates of the run, if the last batch stays."""
        return self._firsts[-1] - (self._before[-1] - self.total) // self._sizes[-1]

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Pairs (first update, batch size), ascending, with the cut batch at the end."""
        found, last = list(zip(self._firsts, self._sizes)), self.updates - 1
        if (cut := self.batch(last)) != found[-1][1]:
            found = [piece for piece in found if piece[0] < last]
            if not found or found[-1][1] != cut:
                found.append((last, cut))
        return found

    @property
    def smallest(self) -> int:
        """The smallest batch size."""
        return min(batch for _, batch in self.pieces)

    @property
    def largest(self) -> int:
        """The largest batch size."""
        return max(batch for _, batch in self.pieces)

    def batch(self, step: int) -> int:
        """Returns the batch size of the update after `step` completed ones; 0 behind the last."""
        return min(self._sizes[self._piece(step)], self.total - self.examples(step))

    def examples(self, step: int) -> int:
        """Returns the examples of `step` completed updates."""
        piece = self._piece(step)
        whole = self._before[piece] + (step - self._firsts[piece]) * self._sizes[piece]
        return min(whole, self.total)

    def batches(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the batch size of the updates `start` to `stop`, by default all, as int64."""
        stop = self.updates if stop is None else min(stop, self.updates)
        pieces = slice(self._piece(start), self._piece(stop - 1) + 1)
        found = np.repeat(
            np.array(self._sizes[pieces], np.int64),
            np.diff([start, *self._firsts[pieces][1:], stop]),
        )
        found[-1] = self.batch(stop - 1)
        return found

    def change(self, step: int, batch: int) -> None:
        """Sets the batch size of the updates after `step` completed ones.

        Raises:
          ValueError: there was a decision for a later update, or the run ends before it.
        """
        before = self.examples(step)
        if step < self._firsts[-1] or before >= self.total:
            raise ValueError(
                f"the batch of update {step} is decided, or the run of {self.total} examples ends "
                "before it"
            )
        if batch == self._sizes[-1]:
            return
        if step == self._firsts[-1]:  # before the first update
            self._sizes[-1] = batch
        else:
            self._firsts.append(step)
            self._sizes.append(batch)
            self._before.append(before)
        self.decisions += 1

    def until(self, step: int) -> list[list[int]]:
        """Returns the pieces decided after `step` updates, as JSON values for `restore`."""
        return [[first, batch] for first, batch in self.pieces if first <= step]

    def restore(self, pieces: Sequence[Sequence[int]]) -> None:
        """Continues from what `until` returned."""
        self._firsts, self._sizes, self._before = [0], [pieces[0][1]], [0]
        self.decisions += 1
        for first, batch in pieces[1:]:
            self.change(first, batch)

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """Yields (update, examples before it, batch size) where a piece begins."""
        for first, batch in self.pieces:
            yield first, self.examples(first), batch

    def _piece(self, step: int) -> int:
        return bisect.bisect_right(self._firsts, step) - 1


def follow(rule: Rule, batch: int, total: int, most: int) -> Path:
    """Returns the path of a rule that needs no statistics.

    >>> from lamb_tpu.batching.rules import Ramp
    >>> follow(Ramp(quantum=8, points=((0, 8), (16, 24))), 16, total=56, most=100).pieces
    [(0, 8), (2, 24), (3, 16)]

    Args:
      rule: decides before the first update, and after those at which it is due.
      batch: the batch size before the first decision.
      total: examples of the run, a whole number of quanta.
      most: the largest number of updates.

    Raises:
      ValueError: the run would have more updates, or the rule needs statistics.
    """
    path, step = Path(batch, total), 0
    while (examples := path.examples(step)) < total:
        if step == most:
            raise ValueError(f"the run would have more than {most:,} updates")
        if rule.due(step):
            path.change(step, rule.next_batch(path.batch(step), {}, examples))
        step += 1
    return path


def describe(path: Path, listed: int = 6) -> str:
    """Returns the path as text, its first `listed` pieces and the last one.

    >>> path = Path(32, total=256)
    >>> path.change(4, 64)
    >>> describe(path)
    '32, 64 from update 4 (128 examples)'
    """
    pieces = list(path.changes())
    parts = [
        f"{batch:,}" + (f" from update {first:,} ({before:,} examples)" if first else "")
        for first, before, batch in pieces
    ]
    if len(parts) > listed + 1:
        skipped = len(parts) - listed - 1
        parts = [*parts[:listed], f"{skipped:,} more changes", parts[-1]]
    return ", ".join(parts)
