"""Words and their numbers, in the order of the classic language models."""

import doctest

import numpy as np
import pytest

from lamb_tpu.data.text import words
from lamb_tpu.data.text.words import encode, make_vocabulary, split_words
from lamb_tpu.errors import UserError

TEXT = " the cat sat \n a cat <unk> \n"


def test_end_of_a_line_is_a_word() -> None:
    assert split_words(TEXT) == ["the", "cat", "sat", "<eos>", "a", "cat", "<unk>", "<eos>"]
    # Also of a line without spaces at its ends, which TensorFlow's reader would glue to it.
    assert split_words("a cat\nsat\n") == ["a", "cat", "<eos>", "sat", "<eos>"]


def test_vocabulary_is_in_the_order_of_counts_and_then_of_words() -> None:
    assert make_vocabulary(split_words(TEXT)) == ["<eos>", "cat", "<unk>", "a", "sat", "the"]
    assert make_vocabulary(split_words(TEXT), 4) == ["<eos>", "cat", "a", "<unk>"]
    assert make_vocabulary(["a"], 4) == ["a", "<unk>"]


def test_unknown_words() -> None:
    vocabulary = make_vocabulary(split_words(TEXT), 4)
    found = encode(["a", "dog", "cat"], vocabulary, "dogs")
    assert found.dtype == np.int32 and found.tolist() == [2, 3, 1]
    with pytest.raises(UserError, match="dogs has the word 'dog', which the training text lacks"):
        encode(["a", "dog"], ["a"], "dogs")


def test_docstrings() -> None:
    assert doctest.testmod(words) == (0, 2)
