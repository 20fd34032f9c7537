"""The order of shuffled training examples, a pure function of (seed, epoch, position).

Training reads one endless stream of examples. Global position `i` is in epoch `i // num_examples`,
at index `i % num_examples` of that epoch's permutation. The order does not depend on the number of
processes. Only the order of `bucketed_order` depends on the batch size.
"""

import functools
from collections.abc import Callable

import numpy as np

from lamb_tpu.data.hashing import words


@functools.lru_cache(maxsize=4)
def example_order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    """Returns the permutation of `range(num_examples)` in which an epoch visits the examples.

    Sorts raw Philox words instead of calling `Generator.permutation`: NumPy guarantees the same
    output in all versions for a bit generator, but not for the methods of `Generator`. Philox:
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Args:
      seed: 0 to 2**64 - 1.
      epoch: counted from 0.
      num_examples: at least 1.

    Returns:
      int64 (num_examples,), read-only because callers share it.

    Raises:
      ValueError: an argument is out of range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} must be from 0 to 2**64-1")
    if epoch < 0 or num_examples < 1:
        raise ValueError(
            f"epoch={epoch} must be at least 0, and num_examples={num_examples} must be at least 1"
        )
    # The key is (seed, epoch), so no epoch depends on earlier ones.
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_examples)
    # A stable sort orders equal random words in the same way on every platform.
    order = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def bucketed_order(
    seed: int, epoch: int, num_examples: int, buckets: np.ndarray, batch_size: int
) -> np.ndarray:
    """Shuffles an epoch into batches of examples with similar lengths.

    The examples are shuffled by `example_order`, sorted by bucket and cut into batches, and then
    the batches are shuffled. Batches that straddle two epochs contain the longest examples of both
    epochs; these examples stay at the start or end of their epoch. Batches start at multiples of
    `batch_size` in the stream of all epochs. `buckets`, int (num_examples,), has the length class of
    each example; see `example_order` for the other arguments and the result.
    """
    shuffled = example_order(seed, epoch, num_examples)
    ordered = shuffled[np.argsort(buckets[shuffled], kind="stable")]
    head = min(-epoch * num_examples % batch_size, num_examples)
    count = (num_examples - head) // batch_size
    full, rest = np.split(ordered, [count * batch_size])
    batch_order = np.argsort(words(seed, epoch, np.arange(count)), kind="stable")
    batches = full.reshape(count, batch_size)[batch_order].ravel()
    return np.concatenate([rest[:head], batches, rest[head:]])


def global_indices(
    seed: int,
    start: int,
    stop: int,
    num_examples: int,
    order_of: Callable[[int, int, int], np.ndarray] = example_order,
) -> np.ndarray:
    """Returns the indices of the examples at positions `start` to `stop - 1` of the endless stream.

    The result is int64 (stop - start,). The range of positions may cross any number of epochs.
    `order_of(seed, epoch, num_examples)` returns the order of an epoch. Raises ValueError if
    `start` is negative or greater than `stop`.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"start={start} and stop={stop} must satisfy 0 <= start <= stop")
    indices = np.empty(stop - start, np.int64)
    position = start
    while position < stop:
        epoch, offset = divmod(position, num_examples)
        count = min(num_examples - offset, stop - position)
        order = order_of(seed, epoch, num_examples)
        indices[position - start : position - start + count] = order[offset : offset + count]
        position += count
    return indices
