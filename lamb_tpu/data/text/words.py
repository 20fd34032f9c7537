"""Words of a text that is already split by spaces, and their numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from lamb_tpu.errors import UserError

END = "<eos>"  # stands for the end of a line
UNKNOWN = "<unk>"


def split_words(text: str) -> list[str]:
    r"""Returns the words of a text, with `END` for each newline.

    >>> split_words(" the cat \n a dog \n")
    ['the', 'cat', '<eos>', 'a', 'dog', '<eos>']
    """
    return text.replace("\n", f" {END} ").split()


def make_vocabulary(words: Sequence[str], size: int | None = None) -> list[str]:
    """Returns the distinct words by falling count, words of one count in the order of their text.

    This is the order of TensorFlow's and PyTorch's language models on the Penn Treebank.

    >>> make_vocabulary("b a b c".split()), make_vocabulary("b a b c".split(), 2)
    (['b', 'a', 'c'], ['b', '<unk>'])

    Args:
      words: the training text.
      size: the largest number of words, of which the last is `UNKNOWN` and stands for the rarest.
        None: all words of the text.
    """
    ordered = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    found = [word for word, _ in ordered]
    if size is None:
        return found
    kept = [word for word in found if word != UNKNOWN][: size - 1]
    return [*kept, UNKNOWN]


def encode(words: Sequence[str], vocabulary: Sequence[str], name: str) -> np.ndarray:
    """Returns the numbers of words, int32 (len(words),); unknown words become `UNKNOWN`.

    TensorFlow's tutorial leaves unknown words out. The Penn Treebank has none.

    Args:
      words: a text.
      vocabulary: see `make_vocabulary`.
      name: name of the text, for the error message.

    Raises:
      UserError: a word is not in the vocabulary, which has no `UNKNOWN`.
    """
    ids: Mapping[str, int] = {word: number for number, word in enumerate(vocabulary)}
    unknown = ids.get(UNKNOWN, -1)
    found = np.array([ids.get(word, unknown) for word in words], np.int32)
    if (found < 0).any():
        raise UserError(
            f"{name} has the word {words[int(np.argmax(found < 0))]!r}, which the training text "
            f"lacks, and that has no {UNKNOWN}; give the two texts of one set"
        )
    return found
