"""Evaluation batches: every example exactly once, the rest of the last batch masked."""

from collections.abc import Iterator

import numpy as np

from lamb_tpu.data.loader import check_shares
from lamb_tpu.data.source import Batch, Source
from lamb_tpu.data.stream import run_ahead


def eval_batches(
    source: Source, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """This process's shares of the batches that cover the source once, in its own order.

    Global batch `b` holds examples `[b * batch_size, (b + 1) * batch_size)`, of which process `p`
    of `P` takes the p-th of P equal contiguous parts. Every process yields the same number of
    batches, all of one shape. Places beyond the last example repeat example 0, with mask 0: a
    real example, because a model may give NaN on zeros and 0 * NaN would spoil the sum.

    Args:
      source: where the examples come from.
      batch_size: examples in a batch over all processes; divisible by `process_count`.
      process_index: 0 to `process_count - 1`.
      process_count: number of processes that share each batch.

    Returns:
      Iterator of the source's fields, (batch_size / P, *shape), and `mask`, float32
      (batch_size / P,): 1 for an example, 0 for padding.

    Raises:
      UserError: `batch_size` does not divide; raised at the call, not at the first batch.
    """
    check_shares(batch_size, process_index, process_count)
    share = batch_size // process_count

    def fetch(number: int) -> Batch:
        first = number * batch_size + process_index * share
        places = np.arange(first, first + share)
        present = places < len(source)
        batch = source.gather(np.where(present, places, 0))
        return {**batch, "mask": present.astype(np.float32)}

    num_batches = -(-len(source) // batch_size)
    if source.in_memory:
        return map(fetch, range(num_batches))
    return run_ahead(fetch, 0, num_batches)
