"""Words and their ids, in the order of TensorFlow's and PyTorch's language models."""

import doctest

import numpy as np

from lamb_tpu.data.text import words
from lamb_tpu.data.text.words import encode, make_vocabulary, split_words
from tests.raising import rejected

TEXT = " the cat sat \n a cat <unk> \n"


def test_end_of_a_line_is_a_word() -> None:
    assert split_words(TEXT) == ["the", "cat", "sat", "<eos>", "a", "cat", "<unk>", "<eos>"]
    # This also holds for a line without a space at its end; TensorFlow's reader would join its last
    # word and <eos>.
    assert split_words("a cat\nsat\n") == ["a", "cat", "<eos>", "sat", "<eos>"]


def test_vocabulary_is_in_the_order_of_counts_and_then_of_words() -> None:
    assert make_vocabulary(split_words(TEXT)) == ["<eos>", "cat", "<unk>", "a", "sat", "the"]
    assert make_vocabulary(split_words(TEXT), 4) == ["<eos>", "cat", "a", "<unk>"]
    assert make_vocabulary(["a"], 4) == ["a", "<unk>"]


def test_unknown_words() -> None:
    vocabulary = make_vocabulary(split_words(TEXT), 4)
    actual = encode(["a", "dog", "cat"], vocabulary, "dogs")
    assert actual.dtype == np.int32 and actual.tolist() == [2, 3, 1]
    with rejected("dogs", ..., "has the word 'dog', but the training"):
        encode(["a", "dog"], ["a"], "dogs")


def test_docstrings() -> None:
    assert doctest.testmod(words) == (0, 2)
