"""Sources: a set whose records are read by index equals the same set in memory."""

import itertools

import numpy as np
import pytest

from lamb_tpu import data
from tests.raising import rejected


class Records:
    def __init__(self, records: list[dict]):
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitems__(self, indices: list[int]) -> list[dict]:
        return [self._records[index] for index in indices]


@pytest.fixture(scope="module")
def both(prepared_dir: str) -> tuple[data.Source, data.Source]:
    return tuple(
        data.load("mnist", "test[:997]", data_dir=prepared_dir, in_memory=in_memory)
        for in_memory in (True, False)
    )


def assert_equal_batches(ours: data.Batch, theirs: data.Batch) -> None:
    assert ours.keys() == theirs.keys()
    for field in ours:
        assert ours[field].dtype == theirs[field].dtype
        np.testing.assert_array_equal(ours[field], theirs[field])


@pytest.mark.parametrize(
    "field, shape, dtype, tokens",
    [
        ("input_ids", (128,), np.int32, 128),
        ("inputs", (20,), np.int32, 20),
        ("inputs", (20,), np.float32, 0),
        ("inputs", (4, 20), np.int32, 0),
        ("image", (8,), np.int32, 0),
    ],
)
def test_tokens_of_an_example(field: str, shape: tuple[int, ...], dtype: type, tokens: int) -> None:
    spec = {field: data.FieldSpec(shape, np.dtype(dtype)), "label": data.FieldSpec((), np.int32)}
    assert data.tokens_of(spec) == tokens


def test_title_is_the_name_without_the_digest_of_the_content() -> None:
    for name, title in (
        ("masked_lm:books:0123456789ab", "masked_lm:books"),
        ("mnist:train", "mnist:train"),
        ("tfds:x:train[:1000]", "tfds:x:train[:1000]"),
    ):
        assert data.title(data.ArraySource(name, {"label": np.zeros(1)}, 2)) == title


@pytest.mark.long
def test_the_two_kinds_agree(both: tuple[data.Source, data.Source]) -> None:
    in_memory, by_record = both
    assert isinstance(in_memory, data.ArraySource) and isinstance(by_record, data.RecordSource)
    assert in_memory.element_spec == by_record.element_spec
    assert len(in_memory) == len(by_record) == 997
    assert in_memory.num_classes == by_record.num_classes == 10
    assert in_memory.name == by_record.name == "mnist:test[:997]"
    assert by_record.gather(np.array([], np.int64))["image"].shape == (0, 28, 28, 1)
    for source in both:
        assert source.vocabulary is None and source.cased is False and source.notes == ()
        indices, epochs = np.array([3, 1]), np.array([0, 5])
        assert_equal_batches(source.gather(indices, epochs), source.gather(indices))


def test_training_streams_agree(both: tuple[data.Source, data.Source]) -> None:
    loaders = [data.TrainLoader(source, 128, seed=0) for source in both]
    for ours, theirs in itertools.islice(zip(*loaders), 20):
        assert_equal_batches(ours, theirs)
    loaders[1].restore(loaders[0].state())
    assert_equal_batches(*map(next, loaders))


def test_evaluation_streams_agree(both: tuple[data.Source, data.Source]) -> None:
    streams = [data.eval_batches(source, 96, np.arange(48, 96)) for source in both]
    batches = list(itertools.zip_longest(*streams))
    assert len(batches) == 11
    for ours, theirs in batches:
        assert_equal_batches(ours, theirs)


def test_text_is_left_out_and_labels_become_int32() -> None:
    records = Records([{"id": "a", "raw": b"b", "label": 3, "pair": np.ones(2, np.float32)}] * 5)
    source = data.RecordSource("own", records, 10)
    batch = source.gather(np.array([4, 0]))
    assert set(batch) == {"label", "pair"}
    assert batch["label"].dtype == np.int32 and batch["label"].tolist() == [3, 3]
    assert batch["pair"].shape == (2, 2)


def test_shapes_that_differ_are_named() -> None:
    source = data.RecordSource("own", Records([{"x": np.ones(2)}, {"x": np.ones(3)}]), None)
    with rejected("field 'x' of example 1 of data set own", ..., "has shape (3,), but example 0"):
        source.read_all()


def test_set_with_only_text_is_rejected() -> None:
    with rejected("data set own", ..., "has no field that is a number or an", "use another set"):
        data.RecordSource("own", Records([{"text": "a"}]), None)


def test_arrays_of_unequal_length_are_rejected() -> None:
    with pytest.raises(ValueError, match="'x': 3, 'label': 2"):
        data.ArraySource("own", {"x": np.ones(3), "label": np.ones(2)}, None)
