"""Training batches: an endless, seeded stream; its only state is the number of examples read."""

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lamb_tpu.data.checking import Check, gather
from lamb_tpu.data.order import bucketed_order, example_order, global_indices
from lamb_tpu.data.source import Batch, Source, title, zeros
from lamb_tpu.data.stream import run_ahead
from lamb_tpu.errors import UserError, out_of_range


class TrainLoader:
    """Endless iterator over this process's rows of the training batches.

    A batch of B examples takes the next B positions of the endless stream (see `order.py`). Each
    process gathers the examples of its rows. Batches may cross epochs, so no example is dropped or
    repeated. The examples and their order depend neither on the number of processes nor on the sizes
    of earlier batches.

    A source with `streams` is not shuffled: global position i is example i % num_examples, so that
    each row continues in the next batch. Every batch must then have one row for each stream.

    If the source has buckets, the `batch_size` examples of a batch have similar lengths, and padding
    is trimmed to the largest bucket in the batch. The order then also depends on `batch_size`.

    Args:
      source: the examples.
      batch_size: number of examples in a batch over all processes; `take` can set another number.
      seed: seed of the order, 0 to 2**64 - 1.
      rows: indices of the rows within a batch, each in 0 ... `batch_size - 1`, whose examples this
        process gathers, in this order; None for all.
      check: checks every batch; None skips the checks.

    Attributes:
      examples: number of examples taken from the stream so far, over all processes.

    Raises:
      UserError: `batch_size` or `seed` is out of range.
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
            raise out_of_range("batch_size", batch_size, "at least 1")
        if not 0 <= seed < 2**64:
            raise out_of_range("seed", seed, "0 to 2**64-1")
        self._source = source
        self._batch_size = batch_size
        self._seed = seed
        self._rows = rows
        self._gather = functools.partial(gather, source) if check is None else check.read
        # The orders of two epochs are cached, because a batch may cross from one epoch to the next.
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
        return self.take(self._batch_size, self._rows)

    def take(self, count: int, rows: np.ndarray | None = None) -> Batch:
        """Takes the next `count` examples of the stream; stacks each field to (rows, *shape).

        This process gathers the examples of the row indices `rows`, in 0 ... `count - 1`; None for
        all. Raises a UserError if the source has streams and their number is not `count`.
        """
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        if self._source.streams not in (None, count):
            problem = f"differs from the {self._source.streams} streams of {title(self._source)}"
            raise UserError("batch size", count, problem, f"use {self._source.streams}")
        if self._source.in_memory:
            batch = self._fetch(self.examples, count, rows)
        else:
            # `rows` is compared by identity, so callers must pass the same array to use the batches
            # that were read ahead.
            same_as_before = self._ahead_of[0] == count and self._ahead_of[1] is rows
            if self._ahead is None or not same_as_before:
                start = self.examples
                self._ahead = run_ahead(
                    lambda number: self._fetch(start + number * count, count, rows), 0, sys.maxsize
                )
                self._ahead_of = (count, rows)
            batch = next(self._ahead)
        self.examples += count
        return batch

    def take_several(self, number: int, count: int, rows: np.ndarray | None = None) -> Batch:
        """Takes `number` batches as `take` does; stacks each field to (number, rows, *shape)."""
        source = self._source
        if source.in_memory and source.streams is None and source.buckets is None:
            # The batches are adjacent in the stream, so all are gathered at once.
            offsets = _offsets(number, count, rows)
            fetched = self._fetch(self.examples, number * count, offsets.ravel())
            self.examples += number * count
            return {
                name: value.reshape(*offsets.shape, *value.shape[1:])
                for name, value in fetched.items()
            }
        batches = [self.take(count, rows) for _ in range(number)]
        return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}

    def take_indices(
        self, number: int, count: int, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Takes `number` batches, but returns only their indices and epochs, each (number, rows)."""
        offsets = _offsets(number, count, rows)
        indices, epochs, _ = self.indices(self.examples, number * count, offsets)
        self.examples += number * count
        return indices, epochs

    def skip(self, count: int, rows: np.ndarray | None = None) -> Batch:
        """Takes the next `count` examples without reading them; returns zeros of their shapes.

        Used by a process that cannot read its examples, until all processes stop together.
        """
        indices, _, bucket = self.indices(self.examples, count, rows)
        self.examples += count
        batch = zeros(self._source, len(indices))
        return batch if self._source.buckets is None else self._source.trim(batch, bucket)

    def state(self) -> dict[str, Any]:
        """Returns the number of examples taken, the source's name and size, and the seed, for JSON."""
        return {"examples": self.examples, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where the loader of `state` stopped; the source and the seed must be the same."""
        for key, here in self._identity().items():
            if (saved := state.get(key)) != here:
                subject, remedy = f"{key} of the saved data position", f"resume with the same {key}"
                raise UserError(subject, saved, f"differs from {here!r} in this run", remedy)
        self.examples = int(state["examples"])
        # Batches read ahead belong to the old position.
        self._ahead = None

    def _identity(self) -> dict[str, Any]:
        # The batch size is left out, because batches of all sizes read the same stream.
        return {"source": self._source.name, "num_examples": len(self._source), "seed": self._seed}

    def indices(
        self, start: int, count: int, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns (indices, epochs, bucket) of the examples that `take` reads from position `start`.

        The arrays `indices` and `epochs` have the shape of `rows`; `bucket` is the largest bucket
        among all `count` examples, or 0 without buckets.
        """
        stop = start + count
        local_rows = slice(None) if rows is None else rows
        # Each example has its own epoch, because a batch may cross epochs.
        epochs, indices = np.divmod(np.arange(start, stop), len(self._source))
        if self._source.streams is None:
            indices = global_indices(self._seed, start, stop, len(self._source), self._order_of)
        # Uses the largest bucket of the global batch: every process needs the same shapes.
        buckets = self._source.buckets
        bucket = 0 if buckets is None else int(buckets[indices].max())
        return indices[local_rows], epochs[local_rows], bucket

    def _fetch(self, start: int, count: int, rows: np.ndarray | None) -> Batch:
        indices, epochs, bucket = self.indices(start, count, rows)
        batch = self._gather(indices, epochs)
        return batch if self._source.buckets is None else self._source.trim(batch, bucket)


def _offsets(number: int, count: int, rows: np.ndarray | None) -> np.ndarray:
    """Returns each row's offset in the stream from the start of the first batch, (number, rows)."""
    return np.arange(number)[:, None] * count + (np.arange(count) if rows is None else rows)
