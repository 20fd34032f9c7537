"""Streams: the rows of training batches; evaluations predict each word but the first exactly once."""

import doctest
import itertools
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import streams
from lamb_tpu.data.text.streams import LAYOUTS, EvalStreams, StreamOptions, TrainingStreams, cut
from lamb_tpu.parallel.rows import microbatch_order
from tests.raising import rejected

WORDS = [f"w{number}" for number in range(107)]
TEXT = np.arange(107, dtype=np.int32)


def source(count: int, steps: int = 5, layout: str = "tensorflow") -> TrainingStreams:
    return TrainingStreams("text:train", TEXT, WORDS, count, StreamOptions(steps, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3, 7, 8])
def test_a_row_goes_on_where_it_ended(layout: str, count: int) -> None:
    actual = source(count, layout=layout)
    epoch = [actual.gather(start + np.arange(count)) for start in range(0, len(actual), count)]
    assert epoch[0]["start"].all() and not any(batch["start"].any() for batch in epoch[1:])
    rows = [np.concatenate(row) for row in zip(*(batch["inputs"] for batch in epoch))]
    targets = [np.concatenate(row) for row in zip(*(batch["targets"] for batch in epoch))]
    length = len(TEXT) // count
    used = sum(int(batch["length"][0]) if "length" in batch else 5 for batch in epoch)
    assert used == (length - 1 if layout == "pytorch" else (length - 1) // 5 * 5)
    for row, target, full in zip(rows, targets, cut(TEXT, count, layout)):
        np.testing.assert_array_equal(row[:used], full[:used])
        np.testing.assert_array_equal(target[:used], full[1 : used + 1])


def test_layouts_drop_different_words() -> None:
    assert cut(TEXT, 3, "tensorflow")[:, 0].tolist() == [0, 35, 70]
    assert cut(TEXT, 3, "zaremba")[:, 0].tolist() == [0, 36, 71]
    assert cut(TEXT, 2, "zaremba")[1, 0] == 54  # half a word is rounded up
    for count in range(1, 60):
        assert cut(TEXT, count, "zaremba").shape == (count, 107 // count)


def test_batches_are_in_order_in_every_epoch_and_process() -> None:
    actual = source(8)
    full = list(itertools.islice(data.TrainLoader(actual, 8, seed=3), 5))
    for number, batch in enumerate(full):  # two windows per epoch
        np.testing.assert_array_equal(batch["inputs"][:, 0], 13 * np.arange(8) + 5 * (number % 2))
    order = microbatch_order(8, 2, 2)
    for rows in (order[:4], order[4:]):
        share = list(itertools.islice(data.TrainLoader(actual, 8, 5, rows), 5))
        for batch, own_rows in zip(full, share, strict=True):
            np.testing.assert_array_equal(own_rows["inputs"], batch["inputs"][rows])
    again = data.TrainLoader(actual, 8, seed=3)
    again.restore({**again.state(), "examples": 24})
    np.testing.assert_array_equal(next(again)["targets"], full[3]["targets"])


def test_other_batches_are_rejected() -> None:
    with rejected("batch size", 4, "differs from the 8 streams of text:train"):
        next(data.TrainLoader(source(8), 4, seed=0))


@pytest.mark.parametrize("count", [1, 2, 7, 53])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_evaluation_predicts_every_word_but_the_first_once(count: int, batch_size: int) -> None:
    actual = EvalStreams("text:test", TEXT, WORDS, StreamOptions(5, eval_streams=count))
    assert len(actual) == count and actual.num_classes == 107
    targets: list[int] = []
    for batch in data.eval_batches(actual, batch_size):
        for row in range(batch_size):
            if batch["mask"][row]:
                length = batch["length"][row]
                inputs, outputs = (batch[name][row].ravel() for name in ("inputs", "targets"))
                assert len(inputs) % 5 == 0 and (outputs[:length] == inputs[:length] + 1).all()
                targets += outputs[:length].tolist()
    assert targets == list(range(1, 107))


def test_shapes_are_known_without_the_text() -> None:
    for layout, count in itertools.product(LAYOUTS, (3, 7)):
        options = StreamOptions(5, layout, eval_streams=count)
        actual = TrainingStreams("text:train", TEXT, WORDS, count, options)
        assert actual.element_spec == streams.training_spec(options)
        assert len(actual) == streams.count_examples("text", 107, count, options)
        batch = actual.gather(np.arange(2))
        for name, spec in actual.element_spec.items():
            assert (batch[name].shape[1:], batch[name].dtype) == spec
        held_out = EvalStreams("text:test", TEXT, WORDS, options)
        assert held_out.element_spec == streams.eval_spec(107, options)


def test_name_stands_for_the_content() -> None:
    names = {
        TrainingStreams("text:train", tokens, words, 2, StreamOptions()).name
        for tokens in (TEXT, TEXT[::-1].copy())
        for words in (WORDS, WORDS[::-1])
    }
    assert len(names) == 4 and all(name.startswith("text:train:") for name in names)
    assert data.title(source(2)) == "text:train"


@pytest.mark.parametrize(
    "option, value, problem",
    [("steps", 0, "out of range"), ("eval_streams", 0, "out of range"), ("layout", "x", "unknown")],
)
def test_errors(option: str, value: Any, problem: str) -> None:
    for training in (True, False):
        with rejected(f"config.data.options.{option}", value, f"is {problem}", "use "):
            options = StreamOptions(**{option: value})
            streams.make("text:train", TEXT, WORDS, options, 4, training)


def test_texts_that_are_too_short() -> None:
    with rejected("config.batch_size", 20, "leaves only 5 of the 107 words of text:train for"):
        source(20)
    with rejected("config.data.options.eval_streams", 107, "is more than the 106 words to"):
        EvalStreams("text:test", TEXT, WORDS, StreamOptions(eval_streams=107))


def test_docstrings() -> None:
    assert doctest.testmod(streams) == (0, 2)
