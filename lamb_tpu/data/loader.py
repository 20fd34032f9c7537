"""Training batches: an endless, seeded stream whose whole state is one batch number."""

import sys
from collections.abc import Iterator
from typing import Any

from lamb_tpu.data.order import global_indices
from lamb_tpu.data.source import Batch, Source
from lamb_tpu.data.stream import run_ahead
from lamb_tpu.errors import UserError


class TrainLoader:
    """Endless iterator over this process's share of the training batches.

    Batch number `b` holds the global positions `[b * B, (b + 1) * B)` of the stream described in
    `order.py`, B being the global batch size; process `p` of `P` gathers the p-th of P equal
    contiguous parts. Batches straddle epochs, so nothing is dropped or repeated, and the
    examples of batch `b` do not depend on the number of processes.

    Args:
      source: where the examples come from.
      global_batch_size: examples in a batch over all processes; divisible by `process_count`.
      seed: of the order, 0 to 2**64 - 1.
      process_index: 0 to `process_count - 1`.
      process_count: number of processes that share each batch.

    Raises:
      UserError: a size does not divide, or is out of range.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        check_shares(global_batch_size, process_index, process_count)
        if not 0 <= seed < 2**64:
            raise UserError(f"seed must lie in 0..2**64-1, found {seed}")
        self._source = source
        self._batch_size = global_batch_size
        self._seed = seed
        self._process_index = process_index
        self._process_count = process_count
        self._next_batch = 0
        self._ahead: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """This process's share: every field of the source, stacked to (B / P, *shape)."""
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
        share = self._batch_size // self._process_count
        start = number * self._batch_size + self._process_index * share
        return self._source.gather(
            global_indices(self._seed, start, start + share, len(self._source))
        )


def check_shares(batch_size: int, process_index: int, process_count: int) -> None:
    """Raises UserError unless each of `process_count` processes gets an equal, non-empty share."""
    if not 0 <= process_index < process_count:
        raise UserError(
            f"process_index must lie in 0..process_count-1, found {process_index} of "
            f"{process_count}"
        )
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"the global batch size must be a multiple of the {process_count} process(es), "
            f"found {batch_size}"
        )
