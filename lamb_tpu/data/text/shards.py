"""Shards of token ids with the bounds of documents and sentences: writing and reading.

A record is a segment of one document, in little-endian numbers: uint32 `continues` (1 if the record
continues the document of the previous record), uint32 number of sentences, the sentences' uint32
lengths in tokens, and the ids, as uint16 if the vocabulary is small enough and otherwise as uint32.
Records are short, so that reading an example by index is cheap even if documents are books.
"""

import functools
import hashlib
import pathlib
import resource
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading, schema

MANIFEST = "manifest.json"
VOCABULARY = "vocab.txt"
FORMAT = 1
IN_MEMORY_BYTES = 2**30  # token ids up to this size are held in memory by default
# A record ends before a sentence that would take it over this number of tokens; sentences are never
# cut.
_RECORD_TOKENS = 8192
_READ_CHUNK = 256  # records read at a time when shards are opened
_OTHER_FILES = 256  # number of files that a process may have open besides shards
_AGAIN = "delete the folder and prepare the text again"
# Groups of one record make reading by index fast; compression level 1 reduces the size by a fifth.
_WRITER_OPTIONS = "group_size:1,zstd:1"


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Counts(msgspec.Struct):
    documents: _Count
    empty_documents: _Count
    sentences: _Count
    cut_sentences: _Count
    tokens: _Count
    unknown_tokens: _Count
    broken_lines: _Count


COUNTS = _Counts.__struct_fields__


class Shard(msgspec.Struct):
    """Entry of a shard in a manifest."""

    name: str
    bytes: _Count
    sha256: str
    counts: _Counts


class _Vocabulary(msgspec.Struct):
    name: str
    size: _Count
    sha256: str


class _Settings(msgspec.Struct):
    cased: bool


class _Totals(_Counts):
    tokens: Annotated[int, msgspec.Meta(ge=1)]


class _Manifest(msgspec.Struct):
    """The keys of a manifest that are checked here; `preparation` compares the other keys."""

    settings: _Settings
    inputs: list[dict]
    vocabulary: _Vocabulary
    counts: _Totals
    shards: list[Shard]


def id_dtype(vocabulary_size: int) -> np.dtype:
    """Returns the dtype of ids in a record."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def write_shard(
    path: str | pathlib.Path, documents: Iterable[Sequence[Sequence[int]]], dtype: np.dtype
) -> None:
    """Writes documents, each a sequence of non-empty sentences of ids, to one ArrayRecord file."""
    from array_record.python.array_record_module import ArrayRecordWriter

    try:
        writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
        for sentences in documents:
            pending: list[Sequence[int]] = []
            num_tokens, continues = 0, 0
            for sentence in sentences:
                if pending and num_tokens + len(sentence) > _RECORD_TOKENS:
                    writer.write(_encode(continues, pending, dtype))
                    pending, num_tokens, continues = [], 0, 1
                pending.append(sentence)
                num_tokens += len(sentence)
            if pending:
                writer.write(_encode(continues, pending, dtype))
        writer.close()
    except RuntimeError as error:  # raised by ArrayRecord
        remedy = "free disk space, or use another folder"
        raise unreadable(path, error, remedy, "cannot be written") from error


class TokenShards:
    """The concatenated tokens of all documents of a prepared folder.

    Attributes:
      folder, manifest, vocabulary: the prepared folder and its contents.
      fingerprint: 12 hexadecimal digits of the manifest's hash; independent of the path.
      cased: whether the tokens keep case and accents.
      sentence_starts: int64 (sentences + 1,): the token at which each sentence begins; the last
        entry is the number of tokens.
      document_starts: int64 (documents + 1,): the sentence at which each document begins.
    """

    def __init__(self, folder: str | pathlib.Path, in_memory: bool | None = None) -> None:
        """Opens a folder and reads the bounds of all sentences.

        Holds all ids in memory if `in_memory` is True, or if it is None and the ids have at most
        `IN_MEMORY_BYTES`. Raises a UserError if the folder is not prepared or is damaged, or if it
        has more shards than the process may open.
        """
        self.folder = pathlib.Path(folder)
        self.manifest, self.fingerprint = _read(self.folder)
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
        chunks: list[np.ndarray] = []
        record_tokens: list[int] = []
        # Sentence bounds are always held in memory, ids only on request.
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
                    chunks.append(ids)
        self.sentence_starts = _starts(np.concatenate([np.zeros(0, np.int64), *lengths]))
        self.document_starts = _starts(np.array(counts, np.int64))
        self._record_starts = _starts(np.array(record_tokens, np.int64))
        # Detects damage that does not prevent decoding.
        actual = (len(counts), len(self.sentence_starts) - 1, int(self.sentence_starts[-1]))
        stated = self.manifest["counts"]
        expected = (stated["documents"], stated["sentences"], stated["tokens"])
        if actual != expected:
            problem = f"holds {actual} documents, sentences and tokens, not {expected}"
            raise UserError(self.folder, ..., problem, _AGAIN)
        self._tokens = np.concatenate([np.zeros(0, self._dtype), *chunks]) if in_memory else None
        self._files: Any = None  # an ArrayRecordDataSource, which mypy cannot see
        if not in_memory:
            from array_record.python.array_record_data_source import ArrayRecordDataSource

            self._files = ArrayRecordDataSource([str(path) for path in paths])

    @functools.cached_property
    def document_token_starts(self) -> np.ndarray:
        """The token at which each document begins, int64 (documents + 1,)."""
        return self.sentence_starts[self.document_starts]

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Returns the ids, int32, at `positions` (int64, any shape) of the concatenated tokens."""
        if self._tokens is not None:
            return self._tokens[positions].astype(np.int32)
        # Each record is read once, however many of the positions are in the record.
        record_of = np.searchsorted(self._record_starts, positions, side="right") - 1
        wanted, which = np.unique(record_of, return_inverse=True)
        if not len(wanted):
            return np.zeros(positions.shape, np.int32)
        try:
            records = self._files.__getitems__(wanted.tolist())
        except RuntimeError as error:  # raised by ArrayRecord
            raise _unreadable(self.folder, error) from error
        ids = [self._decode(item)[2] for item in records]
        offsets = _starts(np.array([len(item) for item in ids], np.int64))[:-1]
        # Converts positions in all tokens to positions in the records that were read.
        shift = (offsets - self._record_starts[wanted])[which.reshape(positions.shape)]
        return np.concatenate(ids)[positions + shift].astype(np.int32)

    def _decode(self, record: bytes) -> tuple[bool, np.ndarray, np.ndarray]:
        # The header has two uint32, 8 bytes, then 4 bytes for each sentence's length.
        continues, count = np.frombuffer(record, "<u4", 2)
        lengths = np.frombuffer(record, "<u4", count, offset=8).astype(np.int64)
        return bool(continues), lengths, np.frombuffer(record, self._dtype, offset=8 + 4 * count)


def _encode(continues: int, sentences: Sequence[Sequence[int]], dtype: np.dtype) -> bytes:
    header = np.array([continues, len(sentences), *map(len, sentences)], "<u4")
    ids = np.concatenate([np.asarray(sentence, dtype) for sentence in sentences])
    return header.tobytes() + ids.tobytes()


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _read(folder: pathlib.Path) -> tuple[dict[str, Any], str]:
    """Returns the manifest, which has the hashes of all shards, and the manifest's fingerprint."""
    try:
        content = reading.read_text(folder / MANIFEST)
        manifest = reading.parse_json(content)
        if not isinstance(manifest, dict):
            raise ValueError("the content is not a JSON object")
    except (OSError, ValueError) as error:
        raise unreadable(
            folder / MANIFEST,
            error,
            "run python -m lamb_tpu.prepare_text to prepare the text or to continue a killed run",
        ) from error
    settings = manifest.get("settings")
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        raise UserError(folder, ..., "was prepared in another format", _AGAIN)
    check_manifest(folder, manifest)
    return manifest, hashlib.sha256(content.encode()).hexdigest()[:12]


def check_manifest(folder: pathlib.Path, manifest: dict) -> None:
    """Raises a UserError that names a manifest's key if the value has a wrong type or range."""
    schema.convert(manifest, _Manifest, f"{folder / MANIFEST} is damaged ({_AGAIN})")


def check_files(folder: pathlib.Path, manifest: dict) -> list[pathlib.Path]:
    """Returns a folder's shards in order; raises a UserError if a file differs from the manifest."""
    listed = {item["name"]: item for item in manifest["shards"]}
    present = {path.name: path for path in folder.glob("*.array_record")}
    for name, item in listed.items():
        if name not in present:
            raise UserError(folder / name, ..., f"is missing, though {MANIFEST} lists it", _AGAIN)
        size = present[name].stat().st_size
        if size != item["bytes"]:
            problem = f"has {size:,} bytes, not {item['bytes']:,} as {MANIFEST} says"
            raise UserError(folder / name, ..., problem, _AGAIN)
    for name in present:
        if name not in listed:
            raise UserError(folder / name, ..., f"is not listed in {MANIFEST}", "remove it")
    vocabulary = folder / VOCABULARY
    if not vocabulary.is_file():
        raise UserError(vocabulary, ..., f"is missing, though {MANIFEST} lists it", _AGAIN)
    if hashlib.sha256(vocabulary.read_bytes()).hexdigest() != manifest["vocabulary"]["sha256"]:
        raise UserError(vocabulary, ..., f"does not match its sha256 in {MANIFEST}", _AGAIN)
    return [present[name] for name in listed]


def _records(path: pathlib.Path) -> Iterable[bytes]:
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        for start in range(0, reader.num_records(), _READ_CHUNK):
            yield from reader.read(start, min(start + _READ_CHUNK, reader.num_records()))
        reader.close()
    except RuntimeError as error:  # raised by ArrayRecord
        raise _unreadable(path, error) from error


def _unreadable(path: pathlib.Path, error: RuntimeError) -> UserError:
    return unreadable(path, error, f"if it is damaged, {_AGAIN}")


def _allow_open(folder: pathlib.Path, num_shards: int) -> None:
    """Raises the limit on open files, often 1,024, because all shards stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and num_shards + _OTHER_FILES > hard:
        problem = f"has {num_shards:,} shards, too many for the {hard:,} files a process may open"
        remedy = "raise that limit (ulimit -Hn), or prepare the text with a larger --shard-bytes"
        raise UserError(folder, ..., problem, remedy)
    # A process may raise its soft limit up to the hard limit.
    if soft != resource.RLIM_INFINITY:
        wanted = soft + num_shards
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
