"""The Penn Treebank as streams of words."""

import lzma
import pathlib

from lamb_tpu.data.source import Source
from lamb_tpu.data.text import streams
from lamb_tpu.data.text.words import encode, make_vocabulary, split_words
from lamb_tpu.errors import UserError, unknown, unreadable
from lamb_tpu.files import reading

SPLITS = ("train", "valid", "test")
# Number of words in each of Mikolov's three files, counting each end of a line as a word; then the
# number of distinct words in train.
NUM_WORDS = {"train": 929_589, "valid": 73_760, "test": 82_430}
VOCABULARY = 10_000
_FILES = "ptb.train.txt, ptb.valid.txt and ptb.test.txt"


def load_ptb(
    split: str,
    source_dir: str | None,
    options: streams.StreamOptions,
    batch_size: int,
    training: bool,
) -> Source:
    """Loads `ptb.SPLIT.txt`, or `ptb.SPLIT.txt.xz`, with the vocabulary of `ptb.train.txt`."""
    if source_dir is None:
        raise UserError("config.data.dir", ..., "is missing", f"give the folder of {_FILES}")
    check_split(split)
    texts = {name: _read(pathlib.Path(source_dir), name) for name in {SPLITS[0], split}}
    vocabulary = make_vocabulary(split_words(texts[SPLITS[0]]))
    tokens = encode(split_words(texts[split]), vocabulary, f"ptb:{split}")
    return streams.make(f"ptb:{split}", tokens, vocabulary, options, batch_size, training)


def check_split(split: str) -> None:
    """Raises a UserError if the Penn Treebank has no such split."""
    if split not in SPLITS:
        raise unknown("split of config.data.name='ptb'", split, SPLITS)


def _read(folder: pathlib.Path, split: str) -> str:
    path = folder / f"ptb.{split}.txt"
    packed = path.with_name(f"{path.name}.xz")
    try:
        if packed.exists() and not path.exists():
            with reading.open_file(packed) as file, lzma.open(file) as unpacked:
                # Limits the size, because a few kilobytes can unpack to gigabytes.
                content = unpacked.read(reading.MAX_TEXT_BYTES + 1)
            if len(content) > reading.MAX_TEXT_BYTES:
                raise ValueError(f"it unpacks to more than {reading.MAX_TEXT_BYTES:,} bytes")
            return reading.decode(content)
        return reading.read_text(path)
    except FileNotFoundError:
        present = ", ".join(sorted(file.name for file in folder.glob("ptb.*"))) or "no file ptb.*"
        problem = f"is missing in {folder}, which has {present}"
        remedy = f"set config.data.dir to the folder of {_FILES}"
        raise UserError(path, ..., problem, remedy) from None
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise unreadable(path, error, "replace it with the original file") from error
