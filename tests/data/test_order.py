"""The order of examples: a permutation for each epoch, however the stream is cut into batches."""

import numpy as np
import pytest

from lamb_tpu.data import example_order, global_indices
from lamb_tpu.data.order import bucketed_order


def test_each_epoch_is_another_permutation() -> None:
    orders = [example_order(3, epoch, 997) for epoch in range(4)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(997))
    for other in orders[1:]:
        assert (other == orders[0]).mean() < 0.02
    assert (example_order(4, 0, 997) == orders[0]).mean() < 0.02


def test_order_is_fixed_for_all_time() -> None:
    # Recorded from the first version: old checkpoints must continue in the same order.
    assert example_order(0, 0, 10).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert example_order(2**64 - 1, 7, 10).tolist() == [3, 0, 7, 4, 6, 9, 8, 1, 5, 2]


def test_order_is_uniform() -> None:
    # In 4,800 epochs, each of the 24 orders of four examples is expected 200 times, with a standard
    # deviation of 13.8.
    seen = [tuple(example_order(1, epoch, 4).tolist()) for epoch in range(4800)]
    counts = np.unique(seen, axis=0, return_counts=True)[1]
    assert len(counts) == 24 and counts.min() > 140 and counts.max() < 260


def test_stream_is_the_epochs_end_to_end() -> None:
    epochs = np.concatenate([example_order(5, epoch, 10) for epoch in range(4)])
    np.testing.assert_array_equal(global_indices(5, 0, 40, 10), epochs)
    np.testing.assert_array_equal(global_indices(5, 7, 33, 10), epochs[7:33])
    assert global_indices(5, 7, 7, 10).tolist() == []


@pytest.mark.parametrize("cut", [1, 7, 16, 64, 997])
def test_stream_does_not_depend_on_the_cut(cut: int) -> None:
    full = global_indices(0, 0, 2000, 97)
    parts = [global_indices(0, at, min(at + cut, 2000), 97) for at in range(0, 2000, cut)]
    np.testing.assert_array_equal(np.concatenate(parts), full)


def test_cached_order_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        example_order(0, 0, 10)[0] = 3


@pytest.mark.parametrize(
    "seed, epoch, num_examples", [(-1, 0, 3), (2**64, 0, 3), (0, -1, 3), (0, 0, 0)]
)
def test_arguments_out_of_range(seed: int, epoch: int, num_examples: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        example_order(seed, epoch, num_examples)


def test_range_backwards() -> None:
    with pytest.raises(ValueError, match="start=5 and stop=4 must"):
        global_indices(0, 5, 4, 10)


@pytest.mark.parametrize("examples, batch", [(100, 8), (96, 8), (7, 16), (64, 1)])
def test_batches_of_one_bucket(examples: int, batch: int) -> None:
    buckets = np.random.default_rng(0).integers(0, 3, examples)
    for epoch in range(3):
        order = bucketed_order(5, epoch, examples, buckets, batch)
        assert sorted(order) == list(range(examples))
        np.testing.assert_array_equal(order, bucketed_order(5, epoch, examples, buckets, batch))
        # Full batches start at multiples of the batch size in the stream of all epochs.
        head = -epoch * examples % batch
        count = max(examples - head, 0) // batch
        full = buckets[order[head : head + count * batch]].reshape(count, batch)
        assert sum(len(set(row)) > 1 for row in full) <= 2  # where two buckets meet


def test_bucketed_orders_differ() -> None:
    buckets = np.random.default_rng(0).integers(0, 3, 100)
    orders = [bucketed_order(*key, 100, buckets, 8) for key in ((5, 0), (5, 1), (6, 0))]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (orders[first] != orders[second]).mean() > 0.8
