"""Parallel text as ids of a joint vocabulary: prepared once, then read by index."""

import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import tokenizers

from lamb_tpu.data.hashing import sha256
from lamb_tpu.data.text.pairs import Pair
from lamb_tpu.data.text.shards import VOCABULARY, id_dtype
from lamb_tpu.data.text.subwords import make_subwords, train_subwords
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import locks, reading, writing

MANIFEST = "manifest.json"
_FORMAT = 1
_SPACES = str.maketrans("\r\n", "  ")  # so that a text fits on one line of a file
_BATCH = 10_000  # pairs that are tokenized together
_IN_MEMORY_BYTES = 2**30  # ids up to this size are read into memory


class _File(msgspec.Struct):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct):
    settings: dict[str, Any]
    pairs: dict[str, int]
    files: dict[str, _File]


class Corpus(Protocol):
    """Pairs of sentences in splits; the vocabulary is trained on `train`."""

    splits: tuple[str, ...]
    sums: dict[str, str]  # a digest of each input

    def read(self, split: str) -> Iterator[Pair]: ...


class Tokens(NamedTuple):
    """The pairs of a split as ids; each sentence ends with [SEP]."""

    ids: np.ndarray  # (tokens,): source and target of the first pair, then of the second, ...
    lengths: np.ndarray  # int32 (pairs, 2), number of tokens of source and target
    references: Callable[[], list[str]]  # returns the original texts of the targets


class Prepared(NamedTuple):
    """Parallel text that is ready to be read."""

    vocabulary: Vocabulary
    digest: str  # 12 hexadecimal digits of a hash of the content
    sizes: dict[str, int]  # split -> number of pairs
    open: Callable[[str], Tokens]  # reads a split


def train_vocabulary(pairs: Callable[[], Iterable[Pair]], size: int) -> Vocabulary:
    """Trains the joint vocabulary on both languages' sentences; see `train_subwords`."""
    return train_subwords(lambda: itertools.chain.from_iterable(pairs()), size)


def tokenize(pairs: Iterable[Pair], vocabulary: Vocabulary) -> Tokens:
    """Converts pairs to ids; the references, which are the targets' texts, stay in memory."""
    tokenizer, end = make_subwords(vocabulary), [vocabulary.sep_id]
    dtype = id_dtype(len(vocabulary))
    chunks: list[np.ndarray] = [np.zeros(0, dtype)]
    lengths: list[int] = []
    references: list[str] = []
    remaining = iter(pairs)
    while batch := list(itertools.islice(remaining, _BATCH)):
        texts = list(itertools.chain.from_iterable(batch))
        encoded = [item.ids + end for item in tokenizer.encode_batch_fast(texts)]
        chunks.append(np.fromiter(itertools.chain.from_iterable(encoded), dtype))
        lengths += map(len, encoded)
        references += [pair.target for pair in batch]
    return Tokens(
        np.concatenate(chunks), np.array(lengths, np.int32).reshape(-1, 2), lambda: references
    )


def digest(pairs: Mapping[str, Iterable[Pair]], vocabulary: Vocabulary) -> str:
    """Returns 12 hexadecimal digits of a hash of pairs in memory and their vocabulary."""
    content_hash = hashlib.sha256(vocabulary.text().encode())
    for pair in itertools.chain.from_iterable(pairs.values()):
        content_hash.update("\n".join((*pair, "")).encode())
    return content_hash.hexdigest()[:12]


def prepare(name: str, corpus: Corpus, vocab_size: int, data_dir: str | None) -> Prepared:
    """Prepares a corpus below `data_dir`, unless it is prepared already, and opens it.

    The same inputs give the same files, byte for byte. The folder is written under a temporary name
    and renamed when it is complete, so an interrupted preparation leaves no incomplete folder. If
    several processes call this function at once, one prepares the corpus and the others wait. Raises
    a UserError if the folder was made from other inputs, is damaged, or cannot be written.
    """
    import tensorflow_datasets as tfds  # imported here, because this takes a third of a second

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
            scratch = folder.with_name(f".{folder.name}.part")
            with writing.checked(scratch, "config.data.prepared_dir"):
                shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
                _write(scratch, corpus, vocab_size, identity)
                scratch.rename(folder)
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
        text = "".join(line.translate(_SPACES) + "\n" for line in tokens.references())
        (folder / f"{split}.references.txt").write_text(text, encoding="utf-8")
        sizes[split] = len(tokens.lengths)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"settings": identity, "pairs": sizes, "files": files}
    writing.replace(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _open(folder: pathlib.Path, identity: dict[str, Any]) -> Prepared:
    again = f"delete {folder}, and run the command again to prepare it"
    try:
        content = reading.read_text(folder / MANIFEST)
        manifest = msgspec.convert(reading.parse_json(content), _Manifest)
        files = manifest.files
        damaged = [
            name for name, item in files.items() if (folder / name).stat().st_size != item.bytes
        ]
        # Compares only sizes, except for the vocabulary: it decodes the ids, so its hash is compared.
        if sha256(folder / VOCABULARY) != files[VOCABULARY].sha256:
            damaged.append(VOCABULARY)
    except (OSError, ValueError, LookupError) as error:
        problem = f"is damaged ({type(error).__name__}: {error})"
        raise UserError(folder, ..., problem, again) from error
    for key, value in identity.items():
        if manifest.settings.get(key) != value:
            problem = f"was prepared with {key}={manifest.settings.get(key)!r}, not {value!r}"
            raise UserError(folder, ..., problem, again)
    if damaged:
        raise UserError(folder / damaged[0], ..., "has changed since it was prepared", again)

    def open_split(split: str) -> Tokens:
        path = folder / f"{split}.ids.npy"
        # Larger files stay on disk; the system caches the pages in use.
        is_small = path.stat().st_size <= _IN_MEMORY_BYTES
        references = folder / f"{split}.references.txt"
        return Tokens(
            _load(path, None if is_small else "r"),
            _load(folder / f"{split}.lengths.npy"),
            lambda: references.read_text(encoding="utf-8").removesuffix("\n").split("\n"),
        )

    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:12]
    return Prepared(Vocabulary.read(folder / VOCABULARY), fingerprint, manifest.pairs, open_split)


def _load(path: pathlib.Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    try:
        return np.load(path, mmap_mode=mmap_mode)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise unreadable(
            path, error, "delete its folder and run the command again", "is damaged"
        ) from error
