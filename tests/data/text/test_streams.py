"""Streams: which words a row of which batch has, and that an evaluation loses and repeats none."""

import doctest
import itertools

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import streams
from lamb_tpu.data.text.streams import LAYOUTS, EvalStreams, Options, TrainingStreams, cut
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.mesh import microbatch_order

WORDS = [f"w{number}" for number in range(107)]
TEXT = np.arange(107, dtype=np.int32)


def source(count: int, steps: int = 5, layout: str = "tensorflow") -> TrainingStreams:
    return TrainingStreams("text:train", TEXT, WORDS, count, Options(steps, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3, 7, 8])
def test_a_row_goes_on_where_it_ended(layout: str, count: int) -> None:
    found = source(count, layout=layout)
    epoch = [found.gather(start + np.arange(count)) for start in range(0, len(found), count)]
    assert epoch[0]["start"].all() and not any(batch["start"].any() for batch in epoch[1:])
    rows = [np.concatenate(row) for row in zip(*(batch["inputs"] for batch in epoch))]
    targets = [np.concatenate(row) for row in zip(*(batch["targets"] for batch in epoch))]
    length = len(TEXT) // count
    used = sum(int(batch["length"][0]) if "length" in batch else 5 for batch in epoch)
    assert used == (length - 1 if layout == "pytorch" else (length - 1) // 5 * 5)
    for row, target, whole in zip(rows, targets, cut(TEXT, count, layout)):
        np.testing.assert_array_equal(row[:used], whole[:used])
        np.testing.assert_array_equal(target[:used], whole[1 : used + 1])


def test_layouts_differ_in_what_they_drop() -> None:
    assert cut(TEXT, 3, "tensorflow")[:, 0].tolist() == [0, 35, 70]
    assert cut(TEXT, 3, "zaremba")[:, 0].tolist() == [0, 36, 71]
    assert cut(TEXT, 2, "zaremba")[1, 0] == 54  # half a word upwards
    for count in range(1, 60):
        assert cut(TEXT, count, "zaremba").shape == (count, 107 // count)


def test_batches_are_in_order_in_every_epoch_and_process() -> None:
    found = source(8)
    whole = list(itertools.islice(data.TrainLoader(found, 8, seed=3), 5))
    for number, batch in enumerate(whole):  # two windows an epoch
        np.testing.assert_array_equal(batch["inputs"][:, 0], 13 * np.arange(8) + 5 * (number % 2))
    order = microbatch_order(8, 2, 2)
    for rows in (order[:4], order[4:]):
        share = list(itertools.islice(data.TrainLoader(found, 8, 5, rows), 5))
        for batch, part in zip(whole, share, strict=True):
            np.testing.assert_array_equal(part["inputs"], batch["inputs"][rows])
    again = data.TrainLoader(found, 8, seed=3)
    again.restore({**again.state(), "examples": 24})
    np.testing.assert_array_equal(next(again)["targets"], whole[3]["targets"])


def test_other_batches_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=(
            "a batch of 4 examples is asked for, and text:train has 8 streams; a batch must have one"
        ),
    ):
        next(data.TrainLoader(source(8), 4, seed=0))


@pytest.mark.parametrize("count", [1, 2, 7, 53])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_evaluation_predicts_every_word_but_the_first_once(count: int, batch_size: int) -> None:
    found = EvalStreams("text:test", TEXT, WORDS, Options(5, eval_streams=count))
    assert len(found) == count and found.num_classes == 107
    targets: list[int] = []
    for batch in data.eval_batches(found, batch_size):
        for row in range(batch_size):
            if batch["mask"][row]:
                length = batch["length"][row]
                inputs, outputs = (batch[name][row].ravel() for name in ("inputs", "targets"))
                assert len(inputs) % 5 == 0 and (outputs[:length] == inputs[:length] + 1).all()
                targets += outputs[:length].tolist()
    assert targets == list(range(1, 107))


def test_shapes_are_known_without_the_text() -> None:
    for layout, count in itertools.product(LAYOUTS, (3, 7)):
        options = Options(5, layout, eval_streams=count)
        found = TrainingStreams("text:train", TEXT, WORDS, count, options)
        assert found.element_spec == streams.training_spec(options)
        assert len(found) == streams.count_examples("text", 107, count, options)
        batch = found.gather(np.arange(2))
        for name, spec in found.element_spec.items():
            assert (batch[name].shape[1:], batch[name].dtype) == spec
        held_out = EvalStreams("text:test", TEXT, WORDS, options)
        assert held_out.element_spec == streams.eval_spec(107, options)


def test_name_stands_for_the_content() -> None:
    names = {
        TrainingStreams("text:train", tokens, words, 2, Options()).name
        for tokens in (TEXT, TEXT[::-1].copy())
        for words in (WORDS, WORDS[::-1])
    }
    assert len(names) == 4 and all(name.startswith("text:train:") for name in names)
    assert data.title(source(2)) == "text:train"


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(steps=0), "config.data.options.steps is 0; it must be at least 1"),
        (Options(eval_streams=0), "config.data.options.eval_streams is 0"),
        (
            Options(layout="torch"),
            "config.data.options.layout is 'torch'; known: tensorflow, pytorch",
        ),
    ],
)
def test_mistakes(options: Options, message: str) -> None:
    for training in (True, False):
        with pytest.raises(UserError, match=message):
            streams.make("text:train", TEXT, WORDS, options, 4, training)


def test_texts_that_are_too_short() -> None:
    with pytest.raises(
        UserError,
        match=(
            "config.batch_size is 20: of the 107 words of text:train each row gets 5, which is no "
            "window of config.data.options.steps=5 words"
        ),
    ):
        source(20)
    with pytest.raises(UserError, match="eval_streams is 107; text:test has 107 words"):
        EvalStreams("text:test", TEXT, WORDS, Options(eval_streams=107))


def test_docstrings() -> None:
    assert doctest.testmod(streams) == (0, 2)
