"""Errors about data that a text model cannot read."""

from typing import Any

import numpy as np

from lamb_tpu import data, models
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.models.bert import HEADS
from lamb_tpu.tasks.text import check_text
from tests.raising import rejected
from tests.tasks.berts import TINY

FIELDS = ("input_ids", "token_type_ids", "attention_mask")


def source(num_words: int | None = None, length: int = 8, **fields: Any) -> data.ArraySource:
    arrays = {name: np.zeros((3, length), np.int32) for name in FIELDS}
    actual = data.ArraySource("made", arrays | fields, None)
    if num_words is not None:
        words = [f"w{number}" for number in range(num_words - len(SPECIAL_TOKENS))]
        actual.vocabulary = Vocabulary([*SPECIAL_TOKENS, *words])
    return actual


def test_outputs_of_one_example() -> None:
    model = models.build(**TINY, heads=HEADS)
    places = {"masked_positions": np.zeros((3, 2), np.int32)}
    outputs = check_text("reading", model, source(TINY["vocab_size"], **places), FIELDS)
    assert outputs["mlm_logits"].shape == (1, 2, TINY["vocab_size"])
    assert outputs["start_logits"].shape == (1, 8)


def test_data_that_does_not_fit() -> None:
    model = models.build(**TINY, heads=("nsp",))
    words, longest = TINY["vocab_size"], TINY["max_positions"]
    with rejected("made", ..., "has the fields input_ids,", "use a data set with input_ids,"):
        check_text("reading", model, source(), (*FIELDS, "answer"))
    with rejected("config.model.vocab_size", 40, "differs from the 99 words of the"):
        check_text("reading", model, source(99), FIELDS)
    with rejected("config.model.max_positions", 16, "is less than the 17 tokens of the"):
        check_text("reading", model, source(length=longest + 1), FIELDS)
    check_text("reading", model, source(words, longest), FIELDS)


def test_a_model_that_does_not_tell_its_words() -> None:
    model = models.build(**TINY, heads=("nsp",))._replace(vocab_size=None, max_positions=None)
    assert "nsp_logits" in check_text("reading", model, source(99), FIELDS)
