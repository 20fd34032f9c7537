"""Joint subwords: conversion to ids and back, and reproducible vocabularies."""

import numpy as np
import pytest

from lamb_tpu.data.text.subwords import make_subwords, to_text, train_subwords
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.raising import rejected

TEXTS = [
    "Ein Mädchen, das (sehr) laut lacht - „schön“, nicht?",
    "It's 3.5 km; don't stop!",
    "Two dogs run.",
    "Zwei Hunde rennen, zwei Hunde springen.",
]


def vocabulary(size: int = 150) -> Vocabulary:
    return train_subwords(lambda: iter(TEXTS), size)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text: str) -> None:
    known = vocabulary()
    ids = make_subwords(known).encode(text).ids
    assert len(ids) > 3
    assert to_text(np.array([known.cls_id, *ids, known.sep_id, *ids, 0]), known) == text


def test_white_space_counts_as_one_space() -> None:
    tokenizer = make_subwords(vocabulary())
    assert tokenizer.encode(" Two\t\u00a0dogs  run.\n").ids == tokenizer.encode("Two dogs run.").ids


def test_unknown_words_are_marked() -> None:
    known = vocabulary()
    ids = make_subwords(known).encode("Two 狗 run.").ids
    assert ids.count(known.unknown_id) == 1
    assert to_text(np.array(ids), known) == "Two ⁇ run."


def test_the_same_text_gives_the_same_vocabulary() -> None:
    first = vocabulary()
    assert first.tokens[: len(SPECIAL_TOKENS)] == list(SPECIAL_TOKENS)
    assert (first.pad_id, first.cls_id, first.sep_id) == (0, 2, 3)
    assert len(first) <= 150 and "▁Hunde" in first.ids
    for _ in range(3):
        assert vocabulary().tokens == first.tokens


def test_too_small_a_vocabulary() -> None:
    with rejected("config.data.options.vocab_size", 20, "is less than the 74 special tokens and"):
        vocabulary(20)
