"""Python's help topics as streams of words, in the form of the Penn Treebank, for smoke runs."""

import functools
import re
from dataclasses import dataclass

from lamb_tpu.data.source import Source
from lamb_tpu.data.text import python_docs, streams
from lamb_tpu.data.text.words import encode, make_vocabulary, split_words
from lamb_tpu.errors import UserError


@dataclass(frozen=True)
class Options(streams.Options):
    """Options of streams, and the number of words in the vocabulary."""

    vocab_size: int = 2000


def load_python_docs_words(split: str, options: Options, batch_size: int, training: bool) -> Source:
    """Loads a split, train or test, as words in lower case and punctuation marks.

    Args:
      split: train or test.
      options: options of the streams.
      batch_size: number of streams in training.
      training: whether the split is for training or for evaluation.

    Raises:
      UserError: the split or an option is wrong, or the text is too short for the batch.
    """
    if options.vocab_size < 2:
        raise UserError(
            f"config.data.options.vocab_size is {options.vocab_size}; it must be at least 2"
        )
    name = f"python_docs_words:{python_docs.check_split(split)}"
    vocabulary = make_vocabulary(_words("train"), options.vocab_size)
    tokens = encode(_words(split), vocabulary, name)
    return streams.make(name, tokens, vocabulary, options, batch_size, training)


@functools.cache
def _words(split: str) -> tuple[str, ...]:
    paragraphs = [text for texts in python_docs.documents(split).values() for text in texts]
    lines = (" ".join(re.findall(r"\w+|[^\w\s]", text.lower())) for text in paragraphs)
    # Each paragraph is a line.
    return tuple(split_words("\n".join(lines) + "\n"))
