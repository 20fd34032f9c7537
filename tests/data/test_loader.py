"""The training loader: its batches do not depend on restarts or on the number of processes."""

import collections
import itertools
import json
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.source import Batch
from lamb_tpu.errors import UserError
from tests.raising import rejected

NUM_EXAMPLES = 101


@pytest.fixture
def source() -> data.ArraySource:
    """A source in which each label is the index of its example."""
    return data.ArraySource("index:train", {"label": np.arange(NUM_EXAMPLES, dtype=np.int32)}, None)


def take(loader: data.TrainLoader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def labels(batches: list[Batch]) -> np.ndarray:
    return np.concatenate([batch["label"] for batch in batches])


def test_nothing_is_lost_or_repeated_over_three_epochs(source: data.ArraySource) -> None:
    batches = take(data.TrainLoader(source, 16, seed=0), 19)  # 304 examples; three epochs have 303
    assert all(batch["label"].shape == (16,) for batch in batches)
    stream = labels(batches)
    assert set(collections.Counter(stream[: 3 * NUM_EXAMPLES].tolist()).values()) == {3}
    for epoch in range(3):
        seen = stream[epoch * NUM_EXAMPLES : (epoch + 1) * NUM_EXAMPLES]
        np.testing.assert_array_equal(seen, data.example_order(0, epoch, NUM_EXAMPLES))


def test_batch_larger_than_the_set(source: data.ArraySource) -> None:
    (batch,) = take(data.TrainLoader(source, 10 * NUM_EXAMPLES, seed=0), 1)
    assert np.bincount(batch["label"]).tolist() == [10] * NUM_EXAMPLES


@pytest.mark.parametrize("process_count", [2, 3, 12])
def test_processes_together_hold_one_batch(source: data.ArraySource, process_count: int) -> None:
    full = take(data.TrainLoader(source, 24, seed=2), 9)
    shares = [
        take(data.TrainLoader(source, 24, 2, rows), 9)
        for rows in np.split(np.arange(24), process_count)
    ]
    for number, batch in enumerate(full):
        together = labels([share[number] for share in shares])
        np.testing.assert_array_equal(together, batch["label"])


def test_rows_need_not_lie_together(source: data.ArraySource) -> None:
    (full,) = take(data.TrainLoader(source, 24, seed=2), 1)
    rows = np.array([5, 4, 20])
    (batch,) = take(data.TrainLoader(source, 24, 2, rows), 1)
    np.testing.assert_array_equal(batch["label"], full["label"][rows])


class Logged(data.ArraySource):
    """A source whose examples include the requested epoch."""

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        return {"label": indices, "epoch": np.broadcast_to(epochs, indices.shape)}


def test_every_position_is_asked_for_in_its_epoch(source: data.ArraySource) -> None:
    output = Logged("logged", source.arrays, None)
    for rows in (None, np.array([5, 4, 15])):
        batches = take(data.TrainLoader(output, 16, 0, rows), 19)
        for number, batch in enumerate(batches):
            positions = [16 * number + row for row in (range(16) if rows is None else rows)]
            assert batch["epoch"].tolist() == [place // NUM_EXAMPLES for place in positions]
    large = next(data.TrainLoader(output, 3 * NUM_EXAMPLES, 0))
    assert np.bincount(large["epoch"]).tolist() == [NUM_EXAMPLES] * 3
    assert all((batch["epoch"] == 0).all() for batch in data.eval_batches(output, 16))


def test_restore_in_the_middle_of_an_epoch(source: data.ArraySource) -> None:
    loader = data.TrainLoader(source, 8, seed=1)
    take(loader, 5)  # 40 of 101 examples
    state = json.loads(json.dumps(loader.state()))
    expected = labels(take(loader, 20))

    again = data.TrainLoader(source, 8, seed=1)
    take(again, 2)
    again.restore(state)
    np.testing.assert_array_equal(labels(take(again, 20)), expected)

    halves = [data.TrainLoader(source, 8, 1, rows) for rows in np.split(np.arange(8), 2)]
    for half in halves:
        half.restore(state)
    batches = [batch for pair in zip(*(take(half, 20) for half in halves)) for batch in pair]
    np.testing.assert_array_equal(labels(batches), expected)


class Streamed(data.ArraySource):
    in_memory = False


@pytest.mark.parametrize("kind", [data.ArraySource, Streamed])
def test_batch_sizes_may_change(source: data.ArraySource, kind: type[data.ArraySource]) -> None:
    expected = labels(take(data.TrainLoader(source, 1, seed=1), 120))
    loader = data.TrainLoader(kind("index:train", source.arrays, None), 8, seed=1)
    sizes = [8, 8, 24, 24, 8, 16, 32]
    actual = labels([loader.take(size) for size in sizes])
    np.testing.assert_array_equal(actual, expected)
    assert loader.examples == loader.state()["examples"] == 120
    rows = np.array([3, 0])
    (batch,) = [loader.take(8, rows)]
    after = labels(take(data.TrainLoader(source, 8, seed=1), 16))[120:]
    np.testing.assert_array_equal(batch["label"], after[rows])
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        loader.take(0)


@pytest.mark.parametrize(
    "key, other", [("seed", 2), ("num_examples", 100), ("source", "other:train")]
)
def test_other_runs_state_is_rejected(source: data.ArraySource, key: str, other: object) -> None:
    loader = data.TrainLoader(source, 8, seed=1)
    with rejected(f"{key} of the saved data position", other, "in this run"):
        loader.restore({**loader.state(), key: other})
    with rejected(f"{key} of the saved data position", None):
        loader.restore({name: at for name, at in loader.state().items() if name != key})


class Broken(data.ArraySource):
    in_memory = False

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        raise UserError("the third record", ..., "is damaged")


def test_error_while_reading_ahead_reaches_the_caller(source: data.ArraySource) -> None:
    broken = Broken("broken", source.arrays, None)
    with rejected("the third record", ..., "is damaged"):
        next(data.TrainLoader(broken, 8, 0))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(batch_size=0, seed=0), ("batch_size", 0, "is out of range", "use at least 1")),
        (dict(batch_size=8, seed=-1), ("seed", -1, "is out of range", "use 0 to 2**64-1")),
    ],
)
def test_bad_arguments(source: data.ArraySource, arguments: dict, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        data.TrainLoader(source, **arguments)
