"""Evaluation batches: every example exactly once, with the padding of the last batch masked."""

from collections.abc import Iterator

import numpy as np

from lamb_tpu.data.checking import Check, gather
from lamb_tpu.data.source import Batch, Source
from lamb_tpu.data.stream import run_ahead


def eval_batches(
    source: Source, batch_size: int, rows: np.ndarray | None = None, check: Check | None = None
) -> Iterator[Batch]:
    """Yields this process's rows of the batches that cover the source once, in order.

    Global batch `b` holds examples `[b * batch_size, (b + 1) * batch_size)`. Every process yields
    the same number of batches, all of one shape. Rows after the last example repeat example 0 with
    mask 0. Zeros would not be safe padding: a model may return NaN for zeros, and 0 * NaN is NaN.

    Args:
      source, batch_size, rows, check: see `TrainLoader`.

    Returns:
      Batches of the source's fields, (rows, *shape), and `mask`, float32 (rows,): 1 for an
      example, 0 for padding and for examples that the source itself masks.
    """
    within = np.arange(batch_size) if rows is None else rows

    def fetch(number: int) -> Batch:
        positions = number * batch_size + within
        present = positions < len(source)
        indices = np.where(present, positions, 0)
        batch = gather(source, indices) if check is None else check.read(indices)
        mask = present.astype(np.float32)
        return {**batch, "mask": mask * batch["mask"] if "mask" in batch else mask}

    # Each process yields the same number of batches, because all take part in a step's collectives.
    num_batches = -(-len(source) // batch_size)
    if source.in_memory:
        return map(fetch, range(num_batches))
    return run_ahead(fetch, 0, num_batches)
