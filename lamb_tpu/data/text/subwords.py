"""Subwords of a joint vocabulary of two languages, and their conversion back to text."""

from collections.abc import Callable, Iterable

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from lamb_tpu.data.text.vocabulary import CONTINUES, SPECIAL_TOKENS, Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer, train_segments

_SPACE = "▁"  # replaces the space before a token
_UNKNOWN = "⁇"  # written for an unknown word


def make_subwords(vocabulary: Vocabulary) -> Tokenizer:
    """Returns a WordPiece tokenizer that keeps case, accents and spaces and adds no special tokens.

    Words end at spaces and punctuation. A space becomes `▁` at the start of the next token, so that
    `to_text` can restore the text; runs of white space count as one space.
    """
    tokenizer = make_tokenizer(vocabulary, cased=True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    return tokenizer


def train_subwords(read: Callable[[], Iterable[str]], size: int) -> Vocabulary:
    """Trains a vocabulary for `make_subwords`; see `train_segments`."""
    tokenizer = make_subwords(Vocabulary(SPECIAL_TOKENS))
    return train_segments(read, size, tokenizer, "config.data.options.vocab_size")


def to_text(ids: np.ndarray, vocabulary: Vocabulary) -> str:
    """Converts token ids, int (n,), to text, up to the first [SEP]; ignores [PAD] and [CLS]."""
    segments = []
    for number in ids.tolist():
        if number == vocabulary.sep_id:
            break
        if number == vocabulary.unknown_id:
            segments.append(f" {_UNKNOWN} ")
        elif number not in (vocabulary.pad_id, vocabulary.cls_id):
            segments.append(vocabulary.tokens[number].removeprefix(CONTINUES))
    return " ".join("".join(segments).replace(_SPACE, " ").split())
