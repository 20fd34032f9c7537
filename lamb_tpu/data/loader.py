"""Training batches: an endless, seeded stream whose only state is the number of examples read."""

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lamb_tpu.data.checking import Check, gather
from lamb_tpu.data.order import bucketed_order, example_order, global_indices
from lamb_tpu.data.source import Batch, Source, title, zeros
from lamb_tpu.data.stream import run_ahead
from lamb_tpu.errors import UserError


class TrainLoader:
    """Endless iterator over this process's share of the training batches.

    A batch of B examples holds the next B global positions of the stream described in `order.py`; a
    process gathers those of its rows. Batches cross epochs, so nothing is dropped or repeated. The
    examples of a batch and their order depend neither on the number of processes nor on the sizes
    of the batches before it.

    A source of streams is not shuffled: global position i is example i % num_examples, so that each
    row of a batch goes on in the batch after it. Batches must have one row of each stream then.

    Where the source has buckets, each batch of `batch_size` has examples of like lengths, and its
    padding is cut to what the longest needs. The order is then a function of that size too.

    Args:
      source: the examples.
      batch_size: number of examples in a batch over all processes, unless `take` gets another.
      seed: seed of the order, 0 to 2**64 - 1.
      rows: places within a batch, each in 0 ... `batch_size - 1`, whose examples this process
        gathers, in this order; None for all.
      check: check of every batch; None: batches are not checked.

    Attributes:
      examples: number of examples that have been taken from the stream, over all processes.

    Raises:
      UserError: a size or the seed is out of range.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int,
        rows: np.ndarray | None = None,
        check: Check | None = None,
    ):
        if batch_size < 1:
            raise UserError(f"the batch size must be at least 1, found {batch_size}")
        if not 0 <= seed < 2**64:
            raise UserError(f"seed must lie in 0..2**64-1, found {seed}")
        self._source = source
        self._batch_size = batch_size
        self._seed = seed
        self._rows = rows
        self._gather = functools.partial(gather, source) if check is None else check.read
        # Two epochs, because batches cross them.
        self._order_of = (
            example_order
            if source.buckets is None
            else functools.lru_cache(2)(
                functools.partial(bucketed_order, buckets=source.buckets, batch_size=batch_size)
            )
        )
        self.examples = 0
        self._ahead: Iterator[Batch] | None = None
        self._ahead_of: tuple[int, np.ndarray | None] = (0, None)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Takes the next `batch_size` examples."""
        return self.take(self._batch_size, self._rows)

    def take(self, count: int, rows: np.ndarray | None = None) -> Batch:
        """Takes the next `count` examples of the stream.

        Args:
          count: number of examples over all processes, at least 1.
          rows: places in 0 ... `count - 1` whose examples this process gathers; None for all.

        Returns:
          Every field of the source, stacked to (rows, *shape).
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, found {count}")
        if self._source.streams not in (None, count):
            raise UserError(
                f"a batch of {count} examples is asked for, and {title(self._source)} has "
                f"{self._source.streams} streams; a batch must have one example of each"
            )
        if self._source.in_memory:
            batch = self._fetch(self.examples, count, rows)
        else:
            # `rows` is compared by identity, so a caller must pass the same array to keep what was
            # read ahead.
            same_as_before = self._ahead_of[0] == count and self._ahead_of[1] is rows
            if self._ahead is None or not same_as_before:
                self._ahead = self._read_ahead(self.examples, count, rows)
                self._ahead_of = (count, rows)
            batch = next(self._ahead)
        self.examples += count
        return batch

    def skip(self, count: int, rows: np.ndarray | None = None) -> Batch:
        """Takes the next `count` examples without reading them; returns zeros of their shapes.

        For a process of several that cannot read its examples, until all processes end.
        """
        indices, _, bucket = self.places(self.examples, count, rows)
        self.examples += count
        batch = zeros(self._source, len(indices))
        return batch if self._source.buckets is None else self._source.trim(batch, bucket)

    def state(self) -> dict[str, Any]:
        """Returns the position, and the source, size and seed it belongs to, as JSON values."""
        return {"examples": self.examples, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the loader that returned `state` was.

        Raises:
          UserError: `state` belongs to another source, size or seed.
        """
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise UserError(
                    f"the saved data position has {key} = {state.get(key)!r}, this run has "
                    f"{here!r}; a run can only be resumed with the same {key}"
                )
        if "next_batch" in state:  # a checkpoint of 0.1.0 counts batches of one size
            self.examples = int(state["next_batch"]) * int(state["global_batch_size"])
        else:
            self.examples = int(state["examples"])
        # Batches that were read ahead belong to the old position.
        self._ahead = None

    def _identity(self) -> dict[str, Any]:
        # The batch size is left out: batches of several sizes are one stream.
        return {"source": self._source.name, "num_examples": len(self._source), "seed": self._seed}

    def _read_ahead(self, start: int, count: int, rows: np.ndarray | None) -> Iterator[Batch]:
        """Yields batches of `count` examples from `start` on, read ahead by threads."""

        def fetch(number: int) -> Batch:
            return self._fetch(start + number * count, count, rows)

        return run_ahead(fetch, 0, sys.maxsize)

    def places(
        self, start: int, count: int, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns indices and epochs of the examples that `take` reads from position `start` on.

        Args:
          start: number of examples taken before, over all processes.
          count, rows: see `take`.

        Returns:
          Indices and epochs, (rows,), and the largest bucket of all `count` examples, 0 without.
        """
        stop = start + count
        own = slice(None) if rows is None else rows
        # One number for each example, because a batch may cross epochs.
        epochs, indices = np.divmod(np.arange(start, stop), len(self._source))
        if self._source.streams is None:
            indices = global_indices(self._seed, start, stop, len(self._source), self._order_of)
        # By all examples of the batch, because every process must have the same shapes.
        buckets = self._source.buckets
        bucket = 0 if buckets is None else int(buckets[indices].max())
        return indices[own], epochs[own], bucket

    def _fetch(self, start: int, count: int, rows: np.ndarray | None) -> Batch:
        indices, epochs, bucket = self.places(start, count, rows)
        batch = self._gather(indices, epochs)
        return batch if self._source.buckets is None else self._source.trim(batch, bucket)
