"""A WordPiece vocabulary: tokens and their ids."""

import pathlib
from collections.abc import Sequence

import numpy as np

from lamb_tpu.errors import UserError
from lamb_tpu.files import reading

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"  # prefix of a token that continues a word


class Vocabulary:
    """The tokens of a `vocab.txt`, one in each line; the id is the line's number, from 0.

    Attributes:
      tokens: all tokens, in the order of their ids.
      ids: token -> id.
      continues: bool (size,): whether the token continues a word, written with `##`.
      pad_id, unknown_id, cls_id, sep_id, mask_id: ids of the special tokens.
    """

    def __init__(self, tokens: Sequence[str], path: str = "the vocabulary") -> None:
        """Raises UserError with `path` if a special token is missing or a token occurs twice."""
        self.tokens = list(tokens)
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        missing = [token for token in SPECIAL_TOKENS if token not in self.ids]
        if missing:
            raise UserError(
                f"{path} is no vocabulary of BERT's, a token a line: it has no {', '.join(missing)}"
            )
        if len(self.ids) != len(self.tokens):
            twice = next(token for n, token in enumerate(self.tokens) if self.ids[token] != n)
            raise UserError(f"{path} has the token {twice!r} twice; each must stand once")
        self.continues = np.array([token.startswith(CONTINUES) for token in self.tokens])
        self.pad_id, self.unknown_id, self.cls_id, self.sep_id, self.mask_id = (
            self.ids[token] for token in SPECIAL_TOKENS
        )

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "Vocabulary":
        """Reads a `vocab.txt`. Raises UserError as the constructor, and if there is no file."""
        try:
            text = reading.read_text(path)
        except OSError as error:
            raise UserError(f"the vocabulary {path} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"the vocabulary {path} is not UTF-8 ({error})") from error
        except ValueError as error:
            raise UserError(f"the vocabulary {path} cannot be read ({error})") from error
        # Only "\n" ends a line: a token may be another of Unicode's line separators.
        return cls([line.rstrip("\r") for line in text.removesuffix("\n").split("\n")], str(path))

    def write(self, path: str | pathlib.Path) -> None:
        """Writes a `vocab.txt`."""
        pathlib.Path(path).write_text(self.text(), "utf-8")

    def text(self) -> str:
        """The content of a `vocab.txt`."""
        return "".join(f"{token}\n" for token in self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)
