"""Parallel text as ids of a joint vocabulary: prepared once, then read by index."""

import functools
import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow_datasets as tfds
import tokenizers

from lamb_tpu.data.text.pairs import Pair
from lamb_tpu.data.text.shards import VOCABULARY, id_dtype
from lamb_tpu.data.text.subwords import make_subwords, train_subwords
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.files import locks, reading, writing

MANIFEST = "manifest.json"
_FORMAT = 1
_BATCH = 10_000  # number of pairs that are tokenized together
_IN_MEMORY_BYTES = 2**30  # ids up to this size are read into memory


class Corpus(Protocol):
    """Pairs of sentences, in splits; `train` is that of the vocabulary.

    Attributes:
      splits: names of the splits.
      sums: a digest of each input.
    """

    splits: tuple[str, ...]
    sums: dict[str, str]

    def read(self, split: str) -> Iterator[Pair]: ...


class Tokens(NamedTuple):
    """The pairs of a split as ids, each sentence with [SEP] at its end.

    Attributes:
      ids: (tokens,): source and target of the first pair, of the second, and so on.
      lengths: int32 (pairs, 2), of source and target.
      references: returns the targets' texts, as they were.
    """

    ids: np.ndarray
    lengths: np.ndarray
    references: Callable[[], list[str]]


class Prepared(NamedTuple):
    """Parallel text that is ready to be read.

    Attributes:
      vocabulary: the joint vocabulary.
      digest: 12 hexadecimal digits that stand for the content.
      sizes: split -> number of pairs.
      open: reads a split.
    """

    vocabulary: Vocabulary
    digest: str
    sizes: dict[str, int]
    open: Callable[[str], Tokens]


def train_vocabulary(pairs: Callable[[], Iterable[Pair]], size: int) -> Vocabulary:
    """Trains the joint vocabulary on the sentences of both languages. Raises `train_subwords`'s."""
    return train_subwords(lambda: itertools.chain.from_iterable(pairs()), size)


def tokenize(pairs: Iterable[Pair], vocabulary: Vocabulary) -> Tokens:
    """Splits pairs into ids. The references are kept in memory."""
    tokenizer, end = make_subwords(vocabulary), [vocabulary.sep_id]
    dtype = id_dtype(len(vocabulary))
    parts: list[np.ndarray] = [np.zeros(0, dtype)]
    lengths: list[int] = []
    references: list[str] = []
    whole = iter(pairs)
    while batch := list(itertools.islice(whole, _BATCH)):
        texts = list(itertools.chain.from_iterable(batch))
        encoded = [item.ids + end for item in tokenizer.encode_batch_fast(texts)]
        parts.append(np.fromiter(itertools.chain.from_iterable(encoded), dtype))
        lengths += map(len, encoded)
        references += [pair.target for pair in batch]
    return Tokens(
        np.concatenate(parts), np.array(lengths, np.int32).reshape(-1, 2), lambda: references
    )


def digest(pairs: Mapping[str, Iterable[Pair]], vocabulary: Vocabulary) -> str:
    """Returns 12 hexadecimal digits that stand for pairs in memory and their vocabulary."""
    found = hashlib.sha256(vocabulary.text().encode())
    for pair in itertools.chain.from_iterable(pairs.values()):
        found.update("\n".join((*pair, "")).encode())
    return found.hexdigest()[:12]


def prepare(name: str, corpus: Corpus, vocab_size: int, data_dir: str | None) -> Prepared:
    """Prepares a corpus below `data_dir`, unless it is there already, and opens it.

    The same inputs give the same files, byte for byte. The folder is written under another name
    and renamed when it is whole, so an interrupted preparation leaves none behind. Of several
    processes one prepares, and the others wait.

    Args:
      name: name of the data set.
      corpus: its pairs.
      vocab_size: most words of the joint vocabulary.
      data_dir: folder of prepared sets; None is TFDS's own.

    Raises:
      UserError: the vocabulary is too small, the folder cannot be written, is damaged, or was made
        of other inputs.
    """
    root = pathlib.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
    folder = root / "lamb_tpu" / f"{name}-{vocab_size}"
    identity = {
        "format": _FORMAT,
        "vocab_size": vocab_size,
        "tokenizers": tokenizers.__version__,
        "inputs": corpus.sums,
    }
    with writing.checked(folder.parent, "config.data.prepared_dir"):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with locks.hold(folder.parent / f".{folder.name}.preparing"):
        if not folder.exists():
            part = folder.with_name(f".{folder.name}.part")
            with writing.checked(part, "config.data.prepared_dir"):
                shutil.rmtree(part, ignore_errors=True)  # of a killed process
                _write(part, corpus, vocab_size, identity)
                part.rename(folder)
    return _open(folder, identity)


def _write(folder: pathlib.Path, corpus: Corpus, vocab_size: int, identity: dict[str, Any]) -> None:
    folder.mkdir()
    vocabulary = train_vocabulary(lambda: corpus.read("train"), vocab_size)
    vocabulary.write(folder / VOCABULARY)
    sizes = {}
    for split in corpus.splits:
        tokens = tokenize(corpus.read(split), vocabulary)
        np.save(folder / f"{split}.ids.npy", tokens.ids)
        np.save(folder / f"{split}.lengths.npy", tokens.lengths)
        text = "".join(f"{_one_line(line)}\n" for line in tokens.references())
        (folder / f"{split}.references.txt").write_text(text, encoding="utf-8")
        sizes[split] = len(tokens.lengths)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"settings": identity, "pairs": sizes, "files": files}
    writing.replace(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _open(folder: pathlib.Path, identity: dict[str, Any]) -> Prepared:
    again = f"delete {folder} and start again, which prepares it anew"
    try:
        content = reading.read_text(folder / MANIFEST)
        manifest = reading.parse_json(content)
        sizes, files = manifest["pairs"], manifest["files"]
        damaged = [
            name for name, item in files.items() if (folder / name).stat().st_size != item["bytes"]
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} is damaged ({told}); {again}") from error
    for key, value in identity.items():
        if manifest["settings"].get(key) != value:
            raise UserError(
                f"{folder} was prepared with {key} = {manifest['settings'].get(key)!r}, and it "
                f"would now be {value!r}; {again}"
            )
    # The sizes of large files, and the content of the one that decides what an id means.
    if _sha256(folder / VOCABULARY) != files[VOCABULARY]["sha256"]:
        damaged.append(VOCABULARY)
    if damaged:
        raise UserError(f"{folder / damaged[0]} is not as it was prepared; {again}")

    def open_split(split: str) -> Tokens:
        path = folder / f"{split}.ids.npy"
        # Larger ones stay on the disk, and the system's cache holds what is used.
        whole = path.stat().st_size <= _IN_MEMORY_BYTES
        return Tokens(
            np.load(path, mmap_mode=None if whole else "r"),
            np.load(folder / f"{split}.lengths.npy"),
            functools.partial(_lines, folder / f"{split}.references.txt"),
        )

    stands_for = hashlib.sha256(content.encode()).hexdigest()[:12]
    return Prepared(Vocabulary.read(folder / VOCABULARY), stands_for, sizes, open_split)


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
