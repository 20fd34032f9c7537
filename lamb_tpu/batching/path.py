"""The path of a run: the batch size of every update, and the number of examples before each update."""

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lamb_tpu.batching.rules import Rule


@dataclasses.dataclass(frozen=True)
class Path:
    """Batch sizes of all updates of a run, as far as they have been decided.

    The last batch size that was decided is used until the end of the run. The run ends with the
    update that reaches `total` examples, and the batch of this update is cut to the remaining
    examples. So at any time every update has a batch size, and a further decision changes only later
    updates. Updates are counted from 0: update t follows t completed updates.

    A segment is a range of updates with the same batch size.

    >>> path = Path.from_segments([(0, 32)], total=288)
    >>> path.updates
    9
    >>> path = path.change(4, 64)
    >>> path.batches().tolist(), [path.examples(step) for step in (0, 4, 5, 7)]
    ([32, 32, 32, 32, 64, 64, 32], [0, 128, 192, 288])
    """

    total: int  # the number of examples of the run
    firsts: tuple[int, ...]  # the first update of each segment, ascending from 0
    sizes: tuple[int, ...]  # the batch size of each segment, in examples
    before: tuple[int, ...]  # the number of examples before each segment

    @classmethod
    def from_segments(cls, segments: Iterable[Sequence[int]], total: int) -> "Path":
        """Returns the path with segments (first update, batch size), like those from `until`."""
        firsts, sizes, before = list[int](), list[int](), list[int]()
        for first, size in segments:
            if sizes and size == sizes[-1]:
                continue
            before.append(before[-1] + (first - firsts[-1]) * sizes[-1] if sizes else 0)
            firsts.append(first)
            sizes.append(size)
        return cls(total, tuple(firsts), tuple(sizes), tuple(before))

    @property
    def updates(self) -> int:
        """The number of updates of the run, if no further decision changes the batch size."""
        return self.firsts[-1] - (self.before[-1] - self.total) // self.sizes[-1]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Pairs (first update, batch size), ascending; a cut last batch is a separate segment."""
        segments, last = list(zip(self.firsts, self.sizes)), self.updates - 1
        if (cut := self.batch(last)) != segments[-1][1]:
            segments = [segment for segment in segments if segment[0] < last]
            if not segments or segments[-1][1] != cut:
                segments.append((last, cut))
        return segments

    @property
    def smallest(self) -> int:
        """The smallest batch size."""
        return min(batch for _, batch in self.segments)

    @property
    def largest(self) -> int:
        """The largest batch size."""
        return max(batch for _, batch in self.segments)

    def batch(self, step: int) -> int:
        """Returns the batch size of update `step`, or 0 after the last update."""
        return min(self.sizes[self._segment(step)], self.total - self.examples(step))

    def examples(self, step: int) -> int:
        """Returns the number of examples in the first `step` updates."""
        segment = self._segment(step)
        uncut = self.before[segment] + (step - self.firsts[segment]) * self.sizes[segment]
        return min(uncut, self.total)

    def batches(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the batch sizes of updates `start` to `stop` - 1, by default of all, as int64."""
        stop = self.updates if stop is None else min(stop, self.updates)
        segments = slice(self._segment(start), self._segment(stop - 1) + 1)
        sizes = np.repeat(
            np.array(self.sizes[segments], np.int64),
            np.diff([start, *self.firsts[segments][1:], stop]),
        )
        sizes[-1] = self.batch(stop - 1)
        return sizes

    def change(self, step: int, batch: int) -> "Path":
        """Returns the path in which update `step` and all later updates have the size `batch`.

        Raises:
          ValueError: the batch size of a later update has already been decided, or the run ends
            before update `step`.
        """
        before = self.examples(step)
        if step < self.firsts[-1] or before >= self.total:
            raise ValueError(
                f"the batch size of update {step} cannot change: it has already been decided, or the "
                f"run of {self.total} examples ends before this update"
            )
        if batch == self.sizes[-1]:
            return self
        if step == self.firsts[-1]:
            return dataclasses.replace(self, sizes=(*self.sizes[:-1], batch))
        return Path(self.total, (*self.firsts, step), (*self.sizes, batch), (*self.before, before))

    def until(self, step: int) -> list[list[int]]:
        """Returns the segments that begin at update `step` or before, as JSON values."""
        return [[first, batch] for first, batch in self.segments if first <= step]

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first update, number of examples before this update, batch size) of each segment."""
        for first, batch in self.segments:
            yield first, self.examples(first), batch

    def _segment(self, step: int) -> int:
        return bisect.bisect_right(self.firsts, step) - 1


def follow(rule: Rule, batch: int, total: int, most: int) -> Path:
    """Returns the path of a rule that needs no statistics.

    >>> from lamb_tpu.batching.rules import Ramp
    >>> follow(Ramp(granularity=8, points=((0, 8), (16, 24))), 16, total=56, most=100).segments
    [(0, 8), (2, 24), (3, 16)]

    Args:
      rule: a rule with empty `needs`. The rule decides before each update for which `due` is true.
      batch: the batch size before the first decision, in examples.
      total: the number of examples of the run, a multiple of the batch granularity.
      most: the largest allowed number of updates.

    Raises:
      ValueError: the run would have more than `most` updates, or the rule returns an invalid batch.
    """
    segments, examples, step = list[tuple[int, int]](), 0, 0
    while examples < total:
        if step == most:
            raise ValueError(f"the run would have more than {most:,} updates; use larger batches")
        if rule.due(step):
            batch = rule.decide(min(batch, total - examples), {}, examples)
        if not segments or batch != segments[-1][1]:
            segments.append((step, batch))
        examples += batch
        step += 1
    return Path.from_segments(segments, total)


def describe(path: Path, listed: int = 6) -> str:
    """Describes a path in one line, with its first `listed` segments and its last segment.

    >>> describe(Path.from_segments([(0, 32), (4, 64)], total=256))
    '32, 64 from update 4 (128 examples)'
    """
    segments = list(path.changes())
    texts = [
        f"{batch:,}" + (f" from update {first:,} ({before:,} examples)" if first else "")
        for first, before, batch in segments
    ]
    if len(texts) > listed + 1:
        skipped = len(texts) - listed - 1
        texts = [*texts[:listed], f"{skipped:,} more changes", texts[-1]]
    return ", ".join(texts)
