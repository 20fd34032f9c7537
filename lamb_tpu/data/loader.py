"""Training batches: an endless, seeded stream whose whole state is one batch number."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from lamb_tpu.data.order import global_indices
from lamb_tpu.data.source import Batch, Source
from lamb_tpu.data.stream import run_ahead
from lamb_tpu.errors import UserError


class TrainLoader:
    """Endless iterator over this process's share of the training batches.

    Batch number `b` holds the global positions `[b * B, (b + 1) * B)` of the stream described in
    `order.py`, B being the global batch size; a process gathers those of its rows. Batches
    straddle epochs, so nothing is dropped or repeated, and the examples of batch `b` and their
    order do not depend on the processes.

    Args:
      source: where the examples come from.
      global_batch_size: examples in a batch over all processes.
      seed: of the order, 0 to 2**64 - 1.
      rows: places within a batch, each in 0 ... `global_batch_size - 1`, whose examples this
        process gathers, in this order; None for all of them.

    Raises:
      UserError: a size or the seed is out of range.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        seed: int,
        rows: np.ndarray | None = None,
    ):
        if global_batch_size < 1:
            raise UserError(f"the global batch size must be at least 1, found {global_batch_size}")
        if not 0 <= seed < 2**64:
            raise UserError(f"seed must lie in 0..2**64-1, found {seed}")
        self._source = source
        self._batch_size = global_batch_size
        self._seed = seed
        self._rows = slice(None) if rows is None else rows
        self._next_batch = 0
        self._ahead: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """This process's rows: every field of the source, stacked to (rows, *shape)."""
        if self._source.in_memory:
            batch = self._fetch(self._next_batch)
        else:
            if self._ahead is None:
                self._ahead = run_ahead(self._fetch, self._next_batch, sys.maxsize)
            batch = next(self._ahead)
        self._next_batch += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The position and what it is a position in, as plain JSON values."""
        return {"next_batch": self._next_batch, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues exactly where the loader that gave `state` stood.

        Raises:
          UserError: `state` is of another source, size, seed or global batch size.
        """
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise UserError(
                    f"the saved data position has {key} = {state.get(key)!r}, this run has "
                    f"{here!r}; a run can only be resumed with the same {key}"
                )
        self._next_batch = int(state["next_batch"])
        self._ahead = None

    def _identity(self) -> dict[str, Any]:
        return {
            "source": self._source.name,
            "num_examples": len(self._source),
            "seed": self._seed,
            "global_batch_size": self._batch_size,
        }

    def _fetch(self, number: int) -> Batch:
        start = number * self._batch_size
        stop = start + self._batch_size
        indices = global_indices(self._seed, start, stop, len(self._source))
        epochs = np.arange(start, stop) // len(self._source)
        return self._source.gather(indices[self._rows], epochs[self._rows])
