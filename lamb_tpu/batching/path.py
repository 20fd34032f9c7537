"""The path of batches: the batch size of every update of a run, and the examples before it."""

import bisect
import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from lamb_tpu.batching.rules import Rule


@dataclasses.dataclass(frozen=True)
class Path:
    """Batch sizes over a run, as pieces of updates of one size.

    >>> path = Path(((0, 32), (4, 64)), updates=6)
    >>> [path.batch(step) for step in range(6)], [path.examples(step) for step in (0, 4, 5, 6)]
    ([32, 32, 32, 32, 64, 64], [0, 128, 192, 256])

    Attributes:
      pieces: pairs (first update, batch size in examples), the first from update 0, ascending.
        Updates are counted from 0: update t follows t completed ones.
      updates: number of updates of the run.
    """

    pieces: tuple[tuple[int, int], ...]
    updates: int

    @functools.cached_property
    def _before(self) -> list[int]:
        """Examples before each piece."""
        found = [0]
        for (first, batch), (end, _) in zip(self.pieces, self.pieces[1:]):
            found.append(found[-1] + (end - first) * batch)
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
        """Returns the batch size of the update after `step` completed ones."""
        return self.pieces[self._piece(step)][1]

    def examples(self, step: int) -> int:
        """Returns the examples of `step` completed updates."""
        piece = self._piece(step)
        first, batch = self.pieces[piece]
        return self._before[piece] + (step - first) * batch

    def batches(self) -> np.ndarray:
        """Returns the batch size of every update, int64 (updates,)."""
        firsts, sizes = np.array(self.pieces, np.int64).T
        return np.repeat(sizes, np.diff(firsts, append=self.updates))

    def until(self, step: int) -> list[list[int]]:
        """Returns the pieces of the first `step` updates, as JSON values for a checkpoint."""
        return [[first, batch] for first, batch in self.pieces if first < step]

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """Yields (update, examples before it, batch size) where a piece begins."""
        for (first, batch), before in zip(self.pieces, self._before, strict=True):
            yield first, before, batch

    def _piece(self, step: int) -> int:
        return bisect.bisect_right(self.pieces, step, key=lambda piece: piece[0]) - 1


def follow(rule: Rule, batch: int, total: int, most: int) -> Path:
    """Returns the path of a rule that needs no statistics.

    The run ends with the update that reaches `total` examples, whose batch is cut to what is left.

    >>> from lamb_tpu.batching.rules import Ramp
    >>> follow(Ramp(quantum=8, points=((0, 8), (16, 24))), 16, total=56, most=100)
    Path(pieces=((0, 8), (2, 24), (3, 16)), updates=4)

    Args:
      rule: decides before the first update, and after those at which it is due.
      batch: the batch size before the first decision.
      total: examples of the run, a whole number of quanta.
      most: the largest number of updates.

    Raises:
      ValueError: the run would have more updates, or the rule needs statistics.
    """
    pieces, updates, examples = list[tuple[int, int]](), 0, 0
    while examples < total:
        if updates == most:
            raise ValueError(f"the run would have more than {most:,} updates")
        if rule.due(updates):
            batch = rule.next_batch(batch, {}, examples)
        taken = min(batch, total - examples)
        if not pieces or pieces[-1][1] != taken:
            pieces.append((updates, taken))
        updates, examples = updates + 1, examples + taken
    return Path(tuple(pieces), updates)


def describe(path: Path, listed: int = 6) -> str:
    """Returns the path as text, its first `listed` pieces and the last one.

    >>> describe(Path(((0, 32), (4, 64)), updates=6))
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
