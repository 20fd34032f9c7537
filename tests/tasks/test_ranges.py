"""Ranges of the fields of the text tasks: valid batches pass, and errors name invalid values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data, models, tasks
from lamb_tpu.data.text.streams import EvalStreams, StreamOptions, TrainingStreams
from tests.raising import rejected
from tests.tasks.berts import TINY, examples

ROWS = np.arange(6)
TEXT = np.random.default_rng(0).integers(13, size=101).astype(np.int32)
WORDS = [f"w{number}" for number in range(13)]
BERT = models.build(**TINY, heads=("mlm", "nsp", "span"))
LSTM = models.build("lstm_lm", vocab_size=13, features=6)


def masked_lm() -> tuple[tasks.Task, data.Source]:
    return tasks.build("masked_lm", BERT), data.ArraySource("mlm", examples(6), None)


def squad() -> tuple[tasks.Task, data.Source]:
    fields = ("input_ids", "token_type_ids", "attention_mask")
    arrays = {name: value for name, value in examples(6).items() if name in fields}
    edges = {f"{edge}_position": np.full(6, 11, np.int32) for edge in ("start", "end")}
    return tasks.build("question_answering", BERT), data.ArraySource("qa", arrays | edges, None)


def streams() -> tuple[tasks.Task, data.Source]:
    source = TrainingStreams("text:train", TEXT, WORDS, 6, StreamOptions(5, "pytorch"))
    return tasks.build("language_model", LSTM), source


def texts() -> tuple[tasks.Task, data.Source]:
    source = EvalStreams("text:test", TEXT, WORDS, StreamOptions(5))
    return tasks.build("language_model", LSTM), source


def pairs() -> tuple[tasks.Task, data.Source]:
    source = data.load("grammar_de_en", "train", options={"vocab_size": 200})
    vocabulary = source.vocabulary
    assert vocabulary is not None
    model = models.build("gnmt", vocab_size=len(vocabulary), features=8, num_layers=2)
    return tasks.build("translation", model), source


# A task and its data, a field, an invalid value, and the valid values as the message gives them.
WRONG: dict[str, tuple[Callable[[], Any], str, int, str]] = {
    "token": (masked_lm, "input_ids", 40, "0 to 39, the words of the vocabulary"),
    "segment": (masked_lm, "token_type_ids", 2, "0 to 1, the segments of the model"),
    "position": (masked_lm, "masked_positions", 12, "0 to 11, the positions of the sequence"),
    "before": (masked_lm, "masked_positions", -1, "0 to 11, the positions of the sequence"),
    "word": (masked_lm, "masked_ids", -100, "0 to 39, the words of the vocabulary"),
    "weight": (masked_lm, "masked_weights", -1, "at least 0 and finite, the weights of words"),
    "sentence": (masked_lm, "next_sentence_label", 2, "0 to 1, whether the second segment follows"),
    "start": (squad, "start_position", 12, "0 to 11, the positions of the sequence"),
    "end": (squad, "end_position", -1, "0 to 11, the positions of the sequence"),
    "input": (streams, "inputs", 13, "0 to 12, the words of the vocabulary"),
    "target": (streams, "targets", -1, "0 to 12, the words of the vocabulary"),
    "length": (streams, "length", 6, "0 to 5, the words of the example"),
    "evaluation": (texts, "targets", 13, "0 to 12, the words of the vocabulary"),
    "source": (pairs, "source_ids", -1, "the words of the vocabulary"),
    "sentence's length": (pairs, "source_length", 0, "1 to 48, the tokens of the sentence"),
    "target's length": (pairs, "target_length", 50, "1 to 49, the tokens of the sentence"),
}


def checked(task: tasks.Task, source: data.Source) -> tuple[data.Check, dict[str, np.ndarray]]:
    """Returns the check of a task's data, and a batch that has passed the check."""
    check = data.Check(source, "train", tasks.field_ranges(task, source))
    return check, check.read(ROWS[: len(source)])


@pytest.mark.parametrize("name", WRONG)
def test_right_batches_pass_and_wrong_values_are_named(name: str) -> None:
    make, field, value, allowed = WRONG[name]
    check, batch = checked(*make())
    wrong = {**batch, field: batch[field].copy()}
    if field == "masked_ids":
        wrong[field] = np.where(batch["masked_weights"] > 0, value, batch[field])
    else:
        wrong[field].reshape(len(wrong[field]), -1)[-1, 0] = value
    with rejected("*", value, f"{allowed}") as caught:
        check(wrong, ROWS[: len(batch[field])])
    assert caught.value.key.startswith(field)


def test_ids_that_do_not_count_may_be_anything() -> None:
    """Many libraries use the label -100 for tokens that do not count."""
    check, batch = checked(*masked_lm())
    ids = np.where(batch["masked_weights"] > 0, 5, -100).astype(np.int32)
    check({**batch, "masked_ids": ids}, ROWS)
    check, batch = checked(*streams())
    short = {**batch, "length": np.full(6, 3, np.int32), "targets": batch["targets"].copy()}
    short["targets"][:, 3:] = -1
    check(short, ROWS)


def test_integer_mask_is_valid() -> None:
    task, source = masked_lm()
    arrays = source.gather(ROWS)
    arrays["attention_mask"] = arrays["attention_mask"].astype(np.int32)
    check, batch = checked(task, data.ArraySource("x", arrays, None))
    batch["attention_mask"][2, 3] = 2
    with rejected("*of example 2 of x (split 'train')", 2, "is not an integer from 0 to 1"):
        check(batch, ROWS)


def test_task_without_ranges() -> None:
    assert tasks.field_ranges(object(), data.ArraySource("x", examples(2), None)) == {}
