"""A WordPiece vocabulary: tokens and their ids."""

import pathlib
from collections.abc import Sequence

import numpy as np

from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading, writing

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"  # prefix of a token that continues a word


class Vocabulary:
    """The tokens of a `vocab.txt`, one in each line; the id is the line number, from 0.

    Attributes:
      tokens: all tokens, in the order of their ids.
      ids: token -> id.
      continues: bool (size,): whether the token continues a word, marked by `##`.
      pad_id, unknown_id, cls_id, sep_id, mask_id: ids of the special tokens.
    """

    def __init__(self, tokens: Sequence[str], path: str = "the vocabulary") -> None:
        """Raises UserError with `path` if a special token is missing or a token is duplicated."""
        self.tokens = list(tokens)
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        missing = [token for token in SPECIAL_TOKENS if token not in self.ids]
        if missing:
            problem = f"is not a vocabulary of BERT: it has no {', '.join(missing)}"
            raise UserError(path, ..., problem, "give a vocab.txt with one token in each line")
        if len(self.ids) != len(self.tokens):
            twice = next(token for n, token in enumerate(self.tokens) if self.ids[token] != n)
            raise UserError(path, ..., f"has the token {twice!r} twice", "remove one of them")
        self.continues = np.array([token.startswith(CONTINUES) for token in self.tokens])
        self.pad_id, self.unknown_id, self.cls_id, self.sep_id, self.mask_id = (
            self.ids[token] for token in SPECIAL_TOKENS
        )

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "Vocabulary":
        """Reads a `vocab.txt`; raises UserError as the constructor does, or if the file is unreadable."""
        try:
            text = reading.read_text(path, max_bytes=reading.MAX_SETTINGS_BYTES)
        except (OSError, ValueError) as error:
            raise unreadable(f"the vocabulary {path}", error, "give another file") from error
        # Only "\n" ends a line, because a token may be another Unicode line separator.
        return cls([line.rstrip("\r") for line in text.removesuffix("\n").split("\n")], str(path))

    def write(self, path: str | pathlib.Path) -> None:
        writing.replace(pathlib.Path(path), self.text(), "the vocabulary")

    def text(self) -> str:
        """Returns the content of a `vocab.txt`."""
        return "".join(f"{token}\n" for token in self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)
