"""Words of a text that is already split by spaces, and their ids."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from lamb_tpu.errors import UserError

END = "<eos>"  # replaces the end of a line
UNKNOWN = "<unk>"


def split_words(text: str) -> list[str]:
    r"""Splits a text into words, with `END` for each newline.

    >>> split_words(" the cat \n a dog \n")
    ['the', 'cat', '<eos>', 'a', 'dog', '<eos>']
    """
    return text.replace("\n", f" {END} ").split()


def make_vocabulary(words: Sequence[str], size: int | None = None) -> list[str]:
    """Returns the distinct words by decreasing count; words of equal count are sorted as text.

    This is the order of TensorFlow's and PyTorch's language models on the Penn Treebank. With a
    maximum `size`, the last word is `UNKNOWN`, which replaces the rarest words.

    >>> make_vocabulary("b a b c".split()), make_vocabulary("b a b c".split(), 2)
    (['b', 'a', 'c'], ['b', '<unk>'])
    """
    counts = Counter(words)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    if size is None:
        return ordered
    frequent = [word for word in ordered if word != UNKNOWN][: size - 1]
    return [*frequent, UNKNOWN]


def encode(words: Sequence[str], vocabulary: Sequence[str], name: str) -> np.ndarray:
    """Returns the ids of words, int32 (len(words),); unknown words become `UNKNOWN`.

    TensorFlow's tutorial drops unknown words instead; the Penn Treebank has none. Raises a UserError
    with `name` if the vocabulary lacks both a word and `UNKNOWN`.
    """
    ids: Mapping[str, int] = {word: number for number, word in enumerate(vocabulary)}
    unknown = ids.get(UNKNOWN, -1)
    encoded = np.array([ids.get(word, unknown) for word in words], np.int32)
    if (encoded < 0).any():
        word = words[int(np.argmax(encoded < 0))]
        problem = f"has the word {word!r}, but the training text has neither it nor {UNKNOWN}"
        raise UserError(name, ..., problem, "use two splits of the same set")
    return encoded
