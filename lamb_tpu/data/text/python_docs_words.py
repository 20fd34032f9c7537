"""Python's help topics as streams of words, in the form of the Penn Treebank, for smoke runs."""

import functools
import math
import re
from dataclasses import dataclass

from lamb_tpu.data.checking import check_options
from lamb_tpu.data.source import Source
from lamb_tpu.data.text import python_docs, streams
from lamb_tpu.data.text.words import encode, make_vocabulary, split_words


@dataclass(frozen=True)
class PythonDocsWordsOptions(streams.StreamOptions):
    """Options of streams, and the number of words in the vocabulary."""

    vocab_size: int = 2000


def load_python_docs_words(
    split: str, options: PythonDocsWordsOptions, batch_size: int, training: bool
) -> Source:
    """Loads a split, train or test, as lower-case words and punctuation marks."""
    check_options(options, vocab_size=(2, math.inf))
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
