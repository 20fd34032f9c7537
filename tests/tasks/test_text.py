"""Data that a model of text cannot read is refused in one sentence."""

from typing import Any

import numpy as np
import pytest

from lamb_tpu import data, models
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.models.bert import HEADS
from lamb_tpu.tasks.text import check_text
from tests.tasks.berts import TINY

FIELDS = ("input_ids", "token_type_ids", "attention_mask")


def source(num_words: int | None = None, length: int = 8, **fields: Any) -> data.ArraySource:
    """Three rows of text."""
    arrays = {name: np.zeros((3, length), np.int32) for name in FIELDS}
    found = data.ArraySource("made", arrays | fields, None)
    if num_words is not None:
        words = [f"w{number}" for number in range(num_words - len(SPECIAL_TOKENS))]
        found.vocabulary = Vocabulary([*SPECIAL_TOKENS, *words])
    return found


def test_outputs_of_one_example() -> None:
    model = models.build(**TINY, heads=HEADS)
    places = {"masked_positions": np.zeros((3, 2), np.int32)}
    outputs = check_text("reading", model, source(TINY["vocab_size"], **places), FIELDS)
    assert outputs["mlm_logits"].shape == (1, 2, TINY["vocab_size"])
    assert outputs["start_logits"].shape == (1, 8)


def test_data_that_does_not_fit() -> None:
    model = models.build(**TINY, heads=("nsp",))
    words, longest = TINY["vocab_size"], TINY["max_positions"]
    with pytest.raises(ValueError, match="reading needs the fields .*, answer; made has input_ids"):
        check_text("reading", model, source(), (*FIELDS, "answer"))
    with pytest.raises(
        ValueError,
        match=rf"vocab_size is {words}, the vocabulary of made has 99 words; set .*vocab_size=99",
    ):
        check_text("reading", model, source(99), FIELDS)
    with pytest.raises(
        ValueError,
        match=rf"max_positions is {longest}, the sequences of made have {longest + 1} tokens; set "
        rf"config.model.max_positions={longest + 1}",
    ):
        check_text("reading", model, source(length=longest + 1), FIELDS)
    check_text("reading", model, source(words, longest), FIELDS)


def test_a_model_that_does_not_tell_its_words() -> None:
    model = models.build(**TINY, heads=("nsp",))._replace(vocab_size=None, max_positions=None)
    assert "nsp_logits" in check_text("reading", model, source(99), FIELDS)
