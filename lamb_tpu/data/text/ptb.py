"""The Penn Treebank as streams of words."""

import lzma
import pathlib

from lamb_tpu.data.source import Source
from lamb_tpu.data.text import streams
from lamb_tpu.data.text.words import encode, make_vocabulary, split_words
from lamb_tpu.errors import UserError
from lamb_tpu.files import reading

SPLITS = ("train", "valid", "test")
# Words of Mikolov's three files, with one for each end of a line, and distinct words of the first.
NUM_WORDS = {"train": 929_589, "valid": 73_760, "test": 82_430}
VOCABULARY = 10_000


def load_ptb(
    split: str, folder: str | None, options: streams.Options, batch_size: int, training: bool
) -> Source:
    """Loads `ptb.SPLIT.txt`, or that file packed as `.xz`; the vocabulary is of `ptb.train.txt`.

    Args:
      split: train, valid or test.
      folder: folder of the files.
      options: options of the streams.
      batch_size: number of streams in training.
      training: whether the split is for training or for evaluation.

    Raises:
      UserError: a file is missing or cannot be read, an option is out of range, or the text is too
        short for the batch.
    """
    if folder is None:
        raise UserError(
            "config.data.dir is missing; for ptb it is the folder of ptb.train.txt, ptb.valid.txt "
            "and ptb.test.txt"
        )
    check_split(split)
    texts = {name: _read(pathlib.Path(folder), name) for name in {SPLITS[0], split}}
    vocabulary = make_vocabulary(split_words(texts[SPLITS[0]]))
    tokens = encode(split_words(texts[split]), vocabulary, f"ptb:{split}")
    return streams.make(f"ptb:{split}", tokens, vocabulary, options, batch_size, training)


def check_split(split: str) -> None:
    """Raises a UserError if the Penn Treebank has no such split."""
    if split not in SPLITS:
        raise UserError(f"config.data: ptb has no split {split!r}; it has {', '.join(SPLITS)}")


def _read(folder: pathlib.Path, split: str) -> str:
    path = folder / f"ptb.{split}.txt"
    packed = path.with_name(f"{path.name}.xz")
    try:
        if packed.is_file() and not path.exists():
            return lzma.decompress(packed.read_bytes()).decode()
        return reading.read_text(path)
    except FileNotFoundError:
        there = ", ".join(sorted(found.name for found in folder.glob("ptb.*"))) or "none of them"
        raise UserError(
            f"{path} is missing; config.data.dir must be the folder of ptb.train.txt, "
            f"ptb.valid.txt and ptb.test.txt, and {folder} has {there}"
        ) from None
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
