"""Subwords of two languages that share a vocabulary, with the way back to text."""

from collections.abc import Callable, Iterable

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from lamb_tpu.data.text.vocabulary import CONTINUES, SPECIAL_TOKENS, Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer, train_pieces

_SPACE = "▁"  # begins a token that follows a space
_UNKNOWN = "⁇"  # written for a word that the vocabulary cannot spell


def make_subwords(vocabulary: Vocabulary) -> Tokenizer:
    """Returns a WordPiece tokenizer that keeps case, accents and spaces, and adds no tokens.

    Words end at spaces and punctuation. A space is part of the token behind it, as `▁`, so that
    `to_text` gives the text back; runs of white space count as one space.
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
    """Trains a vocabulary for `make_subwords`; the same text gives the same vocabulary.

    Args:
      read: yields the sentences of both languages; called twice.
      size: most tokens.

    Raises:
      UserError: `size` has no room for the special tokens and the characters of the text.
    """
    tokenizer = make_subwords(Vocabulary(SPECIAL_TOKENS))
    return train_pieces(read, size, tokenizer, "config.data.options.vocab_size")


def to_text(ids: np.ndarray, vocabulary: Vocabulary) -> str:
    """Returns the text of token ids, int (n,), up to the first [SEP]; [PAD] and [CLS] have none."""
    pieces = []
    for number in ids.tolist():
        if number == vocabulary.sep_id:
            break
        if number == vocabulary.unknown_id:
            pieces.append(f" {_UNKNOWN} ")
        elif number not in (vocabulary.pad_id, vocabulary.cls_id):
            pieces.append(vocabulary.tokens[number].removeprefix(CONTINUES))
    return " ".join("".join(pieces).replace(_SPACE, " ").split())
