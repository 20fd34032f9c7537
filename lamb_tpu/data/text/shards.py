"""Shards of token ids with the bounds of documents and sentences: writing and reading.

A record is a part of one document: little-endian uint32 `continues` (1 if the part continues the
document of the previous record), uint32 number of sentences, their uint32 lengths in tokens, then
the ids, uint16 if the vocabulary is small enough. Parts are short, so that reading an example by
index is cheap even if documents are books.
"""

import functools
import hashlib
import json
import pathlib
import resource
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.files import reading

MANIFEST = "manifest.json"
VOCABULARY = "vocab.txt"
FORMAT = 1
IN_MEMORY_BYTES = 2**30  # token ids up to this size are held in memory by default
# A record ends before the sentence that would exceed this; a sentence is never cut.
_RECORD_TOKENS = 8192
_READ_CHUNK = 256  # records read together when shards are opened
_OTHER_FILES = 256  # number of files that a process may have open besides shards
_AGAIN = "delete the folder and prepare the text again"
# Groups of one record make reading by index fast; compression level 1 saves a fifth of the size.
_WRITER_OPTIONS = "group_size:1,zstd:1"


def id_dtype(vocabulary_size: int) -> np.dtype:
    """Returns the dtype of ids in a record."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def write_shard(
    path: str | pathlib.Path, documents: Iterable[Sequence[Sequence[int]]], dtype: np.dtype
) -> None:
    """Writes documents, as ids of their non-empty sentences, to one ArrayRecord file.

    Raises:
      UserError: the file cannot be written, such as on a full disk.
    """
    try:
        writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
        for sentences in documents:
            part: list[Sequence[int]] = []
            num_tokens, continues = 0, 0
            for sentence in sentences:
                if part and num_tokens + len(sentence) > _RECORD_TOKENS:
                    writer.write(_encode(continues, part, dtype))
                    part, num_tokens, continues = [], 0, 1
                part.append(sentence)
                num_tokens += len(sentence)
            if part:
                writer.write(_encode(continues, part, dtype))
        writer.close()
    except RuntimeError as error:  # ArrayRecord's own
        raise UserError(f"{path} cannot be written ({' '.join(str(error).split())})") from error


class TokenShards:
    """All tokens of a prepared folder in one row, documents one after the other.

    Attributes:
      folder: the prepared folder.
      manifest: the folder's manifest, as written by the preparation.
      fingerprint: 12 hexadecimal digits of the manifest's hash, which do not depend on the path.
      vocabulary: the folder's vocabulary.
      cased: whether the tokens keep case and accents.
      sentence_starts: int64 (sentences + 1,): the token at which each sentence begins; the last
        one is the number of tokens.
      document_starts: int64 (documents + 1,): the sentence at which each document begins.
    """

    def __init__(self, folder: str | pathlib.Path, in_memory: bool | None = None) -> None:
        """Opens a folder and reads the bounds of all sentences.

        Args:
          folder: the output of the preparation.
          in_memory: whether to hold all ids in memory; None does so up to `IN_MEMORY_BYTES`.

        Raises:
          UserError: the folder is not prepared, a file of it is missing, extra or damaged, or it
            has more shards than a process may open.
        """
        self.folder = pathlib.Path(folder)
        content = _read(self.folder)
        self.manifest = json.loads(content)
        # The manifest has the hashes of all shards, so its own hash stands for the text.
        self.fingerprint = hashlib.sha256(content).hexdigest()[:12]
        self.vocabulary = Vocabulary.read(self.folder / VOCABULARY)
        self.cased: bool = self.manifest["settings"]["cased"]
        self._dtype = id_dtype(len(self.vocabulary))
        paths = check_files(self.folder, self.manifest)
        num_tokens = self.manifest["counts"]["tokens"]
        if in_memory is None:
            in_memory = num_tokens * self._dtype.itemsize <= IN_MEMORY_BYTES
        if not in_memory:
            _allow_open(self.folder, len(paths))
        lengths: list[np.ndarray] = []
        counts: list[int] = []  # sentences of each document
        parts: list[np.ndarray] = []
        record_tokens: list[int] = []
        # Bounds of sentences are always held in memory, ids only if asked for.
        for path in paths:
            for record in _records(path):
                continues, sentence_lengths, ids = self._decode(record)
                lengths.append(sentence_lengths)
                record_tokens.append(len(ids))
                if continues:
                    counts[-1] += len(sentence_lengths)
                else:
                    counts.append(len(sentence_lengths))
                if in_memory:
                    parts.append(ids)
        self.sentence_starts = _starts(np.concatenate([np.zeros(0, np.int64), *lengths]))
        self.document_starts = _starts(np.array(counts, np.int64))
        self._record_starts = _starts(np.array(record_tokens, np.int64))
        # Damage that can be decoded shows in the totals.
        found = (len(counts), len(self.sentence_starts) - 1, int(self.sentence_starts[-1]))
        stated = self.manifest["counts"]
        expected = (stated["documents"], stated["sentences"], stated["tokens"])
        if found != expected:
            raise UserError(
                f"{self.folder} holds {found} documents, sentences and tokens, its {MANIFEST} says "
                f"{expected}: a shard is damaged; {_AGAIN}"
            )
        self._tokens = np.concatenate([np.zeros(0, self._dtype), *parts]) if in_memory else None
        self._files: Any = None  # an ArrayRecordDataSource, of which mypy knows nothing
        if not in_memory:
            self._files = ArrayRecordDataSource([str(path) for path in paths])

    @functools.cached_property
    def document_token_starts(self) -> np.ndarray:
        """int64 (documents + 1,): the token at which each document begins."""
        return self.sentence_starts[self.document_starts]

    def read(self, places: np.ndarray) -> np.ndarray:
        """Returns the ids, int32, at `places` (int64, any shape) of the row of all tokens.

        Raises:
          UserError: a record is damaged.
        """
        if self._tokens is not None:
            return self._tokens[places].astype(np.int32)
        # Each record is read once, however many places are in it.
        record_of = np.searchsorted(self._record_starts, places, side="right") - 1
        wanted, which = np.unique(record_of, return_inverse=True)
        if not len(wanted):
            return np.zeros(places.shape, np.int32)
        try:
            records = self._files.__getitems__(wanted.tolist())
        except RuntimeError as error:  # ArrayRecord's own
            raise _unreadable(self.folder, error) from error
        ids = [self._decode(item)[2] for item in records]
        offsets = _starts(np.array([len(item) for item in ids], np.int64))[:-1]
        # From a place in the row of all tokens to one in the records that were read.
        shift = (offsets - self._record_starts[wanted])[which.reshape(places.shape)]
        return np.concatenate(ids)[places + shift].astype(np.int32)

    def _decode(self, record: bytes) -> tuple[bool, np.ndarray, np.ndarray]:
        # The header has two uint32, 8 bytes, and 4 bytes for the length of each sentence.
        continues, count = np.frombuffer(record, "<u4", 2)
        lengths = np.frombuffer(record, "<u4", count, offset=8).astype(np.int64)
        return bool(continues), lengths, np.frombuffer(record, self._dtype, offset=8 + 4 * count)


def _encode(continues: int, sentences: Sequence[Sequence[int]], dtype: np.dtype) -> bytes:
    header = np.array([continues, len(sentences), *map(len, sentences)], "<u4")
    ids = np.concatenate([np.asarray(sentence, dtype) for sentence in sentences])
    return header.tobytes() + ids.tobytes()


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _read(folder: pathlib.Path) -> bytes:
    try:
        content = reading.read_text(folder / MANIFEST).encode()
        manifest = reading.parse_json(content.decode())
        if not isinstance(manifest, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is no prepared text, for its {MANIFEST} cannot be read; make one with "
            "python -m lamb_tpu.data.prepare_text, or start it again if it was interrupted"
        ) from error
    if manifest.get("settings", {}).get("format") != FORMAT:
        raise UserError(f"{folder} was prepared in another format; {_AGAIN}")
    return content


def check_files(folder: pathlib.Path, manifest: dict) -> list[pathlib.Path]:
    """Returns the shards of a prepared folder, in order, after checking its files.

    Raises:
      UserError: a file is missing or extra, or has another size than the manifest says.
    """
    listed = {item["name"]: item for item in manifest["shards"]}
    present = {path.name: path for path in folder.glob("*.array_record")}
    for name, item in listed.items():
        if name not in present:
            raise UserError(f"{folder / name} is missing, though {MANIFEST} lists it; {_AGAIN}")
        size = present[name].stat().st_size
        if size != item["bytes"]:
            raise UserError(
                f"{folder / name} has {size:,} bytes, {MANIFEST} says {item['bytes']:,}: it is "
                f"damaged; {_AGAIN}"
            )
    for name in present:
        if name not in listed:
            raise UserError(f"{folder / name} is not listed in {MANIFEST}; take it away")
    vocabulary = folder / VOCABULARY
    if not vocabulary.is_file():
        raise UserError(f"{vocabulary} is missing, though {MANIFEST} lists it; {_AGAIN}")
    if hashlib.sha256(vocabulary.read_bytes()).hexdigest() != manifest["vocabulary"]["sha256"]:
        raise UserError(f"{vocabulary} is not the one that {MANIFEST} names; {_AGAIN}")
    return [present[name] for name in listed]


def _records(path: pathlib.Path) -> Iterable[bytes]:
    try:
        reader = ArrayRecordReader(str(path))
        for start in range(0, reader.num_records(), _READ_CHUNK):
            yield from reader.read(start, min(start + _READ_CHUNK, reader.num_records()))
        reader.close()
    except RuntimeError as error:  # ArrayRecord's own
        raise _unreadable(path, error) from error


def _unreadable(path: pathlib.Path, error: RuntimeError) -> UserError:
    return UserError(
        f"{path} cannot be read ({' '.join(str(error).split())}); if it is damaged, {_AGAIN}"
    )


def _allow_open(folder: pathlib.Path, num_shards: int) -> None:
    """Raises the limit of open files for the shards, which stay open; it is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and num_shards + _OTHER_FILES > hard:
        raise UserError(
            f"{folder} has {num_shards:,} shards, which all stay open while text is read, and a "
            f"process may open {hard:,} files here; raise that (ulimit -Hn), or prepare the text "
            "with a larger --shard-bytes"
        )
    # A process may raise its soft limit up to the hard one.
    if soft != resource.RLIM_INFINITY:
        wanted = soft + num_shards
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
