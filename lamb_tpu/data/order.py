"""The order of shuffled training examples, a pure function of (seed, epoch, position).

Training reads one endless stream of examples. Global position `i` is in epoch `i // num_examples`,
at place `i % num_examples` of that epoch's permutation. This module knows nothing of processes or
batches, so neither can change the order.
"""

import functools
from collections.abc import Callable

import numpy as np

from lamb_tpu.data.hashing import words


@functools.lru_cache(maxsize=4)
def example_order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    """Returns the permutation of `range(num_examples)` in which an epoch visits the examples.

    It sorts raw Philox words instead of calling `Generator.permutation`, so that the order is the
    same in every NumPy version: NumPy guarantees the stream of a bit generator, not of the methods.
    Philox: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Args:
      seed: 0 to 2**64 - 1.
      epoch: counted from 0.
      num_examples: at least 1.

    Returns:
      int64 (num_examples,), read-only because it is shared with later callers.

    Raises:
      ValueError: an argument is out of range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must lie in 0..2**64-1, found {seed}")
    if epoch < 0 or num_examples < 1:
        raise ValueError(f"need epoch >= 0 and num_examples >= 1, found {epoch}, {num_examples}")
    # The key is (seed, epoch), so no epoch needs the ones before it.
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_examples)
    # Stable, so that equal words would give the same order everywhere.
    order = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def bucketed_order(
    seed: int, epoch: int, num_examples: int, buckets: np.ndarray, batch_size: int
) -> np.ndarray:
    """Returns an epoch's order in which the examples of a batch have like lengths.

    The examples are shuffled by `example_order`, sorted by bucket and cut into batches, whose order
    is then shuffled. Batches cross epochs: those that an epoch shares with its neighbours have the
    longest examples, and stay at its ends.

    Args:
      seed, epoch, num_examples: see `example_order`.
      buckets: int (num_examples,), the class of length of each example.
      batch_size: number of examples in a batch; batches begin at its multiples in the stream of all
        epochs.

    Returns:
      int64 (num_examples,): each example once.
    """
    shuffled = example_order(seed, epoch, num_examples)
    ordered = shuffled[np.argsort(buckets[shuffled], kind="stable")]
    head = min(-epoch * num_examples % batch_size, num_examples)
    count = (num_examples - head) // batch_size
    whole, rest = np.split(ordered, [count * batch_size])
    places = np.argsort(words(seed, epoch, np.arange(count)), kind="stable")
    batches = whole.reshape(count, batch_size)[places].ravel()
    return np.concatenate([rest[:head], batches, rest[head:]])


def global_indices(
    seed: int,
    start: int,
    stop: int,
    num_examples: int,
    order_of: Callable[[int, int, int], np.ndarray] = example_order,
) -> np.ndarray:
    """Returns the examples at global positions `start` to `stop - 1` of the endless stream.

    Args:
      seed, num_examples: see `example_order`.
      start, stop: global positions.
      order_of: the order of an epoch, a function of (seed, epoch, num_examples).

    Returns:
      int64 (stop - start,): indices into the source. The range may cross any number of epochs.

    Raises:
      ValueError: `start` is negative or beyond `stop`; see also `example_order`.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"need 0 <= start <= stop, found start {start}, stop {stop}")
    indices = np.empty(stop - start, np.int64)
    position = start
    while position < stop:
        epoch, place = divmod(position, num_examples)
        count = min(num_examples - place, stop - position)
        order = order_of(seed, epoch, num_examples)
        indices[position - start : position - start + count] = order[place : place + count]
        position += count
    return indices
