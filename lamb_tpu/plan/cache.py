"""Cache of compiled programs on disk, so that the same plan is not compiled again.

A plan's key is a hash of all inputs of the compilation: the program, the coordinates of the devices
in their order, the options for the compiler, and the versions of jax, jaxlib and libtpu. KEY.json
holds a `Record`, and KEY.hlo.gz the compiled program.

Both files are untrusted: they may come from another user, an interrupted copy or another program.
Therefore each read checks that the file is regular, that its size is limited before and after
decompression, that the record matches the schema `Record`, and that the digests are right. If a
record is damaged, the program is compiled again.
"""

import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from lamb_tpu.errors import UserError, printable
from lamb_tpu.files import buckets, reading, writing
from lamb_tpu.spec import Spec, flatten

# If two configs agree in these keys, their steps differ only in the batch.
_FAMILY = (
    "model.",
    "data.name",
    "data.options.",
    "task.",
    "optimizer.name",
    "mesh.",
    "parallel.",
    "accumulation_steps",
    "ema.",
    "prng",
)
# Exceptions to _FAMILY, because some recipes derive them from the batch.
_FOLLOWS = ("model.group_size",)


# Hashed into the key of a plan, so that files of another format are never read.
_FORMAT = 2
_MAX_RECORD_BYTES = 2**20
# Large models have programs of tens of MiB.
_MAX_PROGRAM_BYTES = 2**30

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Memory(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Memory of a compiled step on one device, in bytes."""

    arguments: _Bytes  # the state and the batch
    outputs: _Bytes  # the new state and the metrics
    aliased: _Bytes  # outputs that reuse the memory of arguments
    temporaries: _Bytes  # all intermediate arrays, including those in on-chip memory
    program: _Bytes  # the compiled code
    # The largest total size of arrays that are live at the same time.
    peak: Annotated[int, msgspec.Meta(ge=1, le=2**50)]


class Compiled(NamedTuple):
    """The outcome of a compilation."""

    seconds: float
    message: str  # the compiler's out-of-memory message; '' for a step that fits
    memory: Memory | None  # None for a step that does not fit
    program: str  # the optimized HLO; '' for a step that does not fit


class Record(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Content of KEY.json; for seconds, message and memory see `Compiled`."""

    key: str  # also the name of the file, without .json
    digest: _Hash  # SHA-256 of all other fields, see `digest_of`
    program: _Hash  # SHA-256 of the program
    program_bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_PROGRAM_BYTES)]  # length in UTF-8
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e7)]
    message: Annotated[str, msgspec.Meta(max_length=_MAX_RECORD_BYTES)]
    memory: Memory | None
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2**50)]
    # Digest of all settings except the batch; equal for steps that differ only in the batch.
    family: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]

    def digest_of(self) -> str:
        """Computes the digest of the other fields."""
        return _digest(json.dumps(msgspec.to_builtins(self) | {"digest": ""}, sort_keys=True))


def default_folder() -> pathlib.Path:
    """Returns the default folder of the cache, below the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is invalid and ignored (specifications.freedesktop.org/basedir-spec).
    return pathlib.Path(home if os.path.isabs(home) else "~/.cache") / "lamb_tpu" / "plans"


def key_of(lowered: str, coordinates: Sequence[Sequence[int]], options: dict[str, Any]) -> str:
    """Returns the key of `lowered`, a program before compilation, for devices at `coordinates`."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
    settings = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    head = json.dumps([_FORMAT, versions, settings, list(coordinates), options], sort_keys=True)
    return _digest(f"{head}\n{lowered}")[:32]


class Cache:
    """Compiled programs in a folder, which is created when needed; the folder None disables the cache.

    If `is_writable` is False, programs are loaded, but not stored.
    """

    def __init__(self, folder: pathlib.Path | None, is_writable: bool = True) -> None:
        self.folder, self._is_writable = folder, is_writable

    def load(self, key: str) -> Compiled | None:
        """Returns a stored outcome; None if it is missing or, after a warning, if it is damaged."""
        if self.folder is None:
            return None
        try:
            record = read(self.folder / f"{key}.json")
            program = _read_program(self.folder / f"{key}.hlo.gz", record)
        except FileNotFoundError:
            return None
        except ValueError as error:
            again = "compiling again" + ", to replace it" * self._is_writable
            _warn(f"{self.folder / key}.json, a cached program, is damaged ({error}); {again}")
            return None
        return Compiled(record.seconds, record.message, record.memory, program)

    def store(self, key: str, compiled: Compiled, config: Spec, topology: str) -> None:
        """Stores the outcome of a compilation; after a failed write, warns and stores nothing more.

        Two processes may store the same key at once. If the folder then has the record of
        one process and the program of the other, the digest does not match, and the program is
        compiled again when it is next needed.
        """
        if self.folder is None or not self._is_writable:
            return
        content = compiled.program.encode()
        record = Record(
            key=key,
            digest="",
            program=_digest(compiled.program),
            program_bytes=len(content),
            seconds=compiled.seconds,
            message=compiled.message,
            memory=compiled.memory,
            batch_size=config.batch_size,
            family=_family(config, topology),
        )
        record = msgspec.structs.replace(record, digest=record.digest_of())
        path = self.folder / f"{key}.json"
        try:
            with writing.checked(self.folder, "--cache"):
                self.folder.mkdir(parents=True, exist_ok=True)
                for each in (path, path.with_suffix(".hlo.gz")):
                    # `writing.replace` would write to the target of a link, and would reject a pipe.
                    if each.is_symlink() or reading.kind(each) not in (None, "a file"):
                        each.unlink()  # fails for a folder
            # Write the program first, so that a record never exists without its program.
            writing.replace(
                path.with_suffix(".hlo.gz"), gzip.compress(content, 6, mtime=0), "--cache"
            )
            writing.replace(path, msgspec.json.encode(record), "--cache")
        except UserError as error:
            self._is_writable = False
            _warn(f"{error}; the plan continues without storing programs")

    def batches(self, config: Spec, topology: str) -> dict[int, bool]:
        """Returns batch size -> whether it fits, for stored steps with the same settings except the batch."""
        fitting: dict[int, bool] = {}
        if self.folder is None:
            return fitting
        family = _family(config, topology)
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = read(path)
            except (FileNotFoundError, ValueError):
                continue  # another format, damaged, or removed in the meantime
            if record.family == family:
                fits = record.memory is not None
                fitting[record.batch_size] = fitting.get(record.batch_size, False) or fits
        return fitting


def read(path: pathlib.Path) -> Record:
    """Reads KEY.json and checks it in full.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged; the message is the reason.
    """
    try:
        content = reading.read_bytes(path, _MAX_RECORD_BYTES)
        record = msgspec.json.decode(content, type=Record)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if record.key != path.stem:
        raise ValueError(f"its key {record.key[:64]!r} differs from its file name")
    if record.digest != record.digest_of():
        raise ValueError("its digest does not match its content")
    if (record.memory is None) != bool(record.message) or (
        (record.memory is None) != (record.program_bytes == 0)
    ):
        raise ValueError("its memory, message and program_bytes contradict each other")
    return record


def _read_program(path: pathlib.Path, record: Record) -> str:
    """Returns the program of a record; raises the errors of `read`."""
    inflate = zlib.decompressobj(wbits=31)  # gzip
    # gzip makes incompressible data a few bytes longer.
    most = record.program_bytes + record.program_bytes // 1000 + 1024
    try:
        # One byte more than recorded is enough to detect a longer program.
        content = inflate.decompress(reading.read_bytes(path, most), record.program_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"{path.name} cannot be decompressed: {error}") from None
    if not inflate.eof:
        raise ValueError(f"{path.name} is incomplete, or longer than the record says")
    # Check the digest before decoding: damaged bytes may not be valid UTF-8.
    if hashlib.sha256(content).hexdigest() != record.program:
        raise ValueError(f"{path.name} does not match the digest in the record")
    return content.decode()


def open_cache(folder: str) -> Cache:
    """Returns the cache in the folder of --cache; it is read-only if the folder cannot be written.

    Raises:
      UserError: `folder` is a URL (which would be slow, because every plan reads all records), or
        the home folder is unknown.
    """
    if folder == "none":
        return Cache(None)
    path = buckets.local(folder or default_folder(), "--cache")
    try:
        with writing.checked(path, "--cache"):
            path.exists()  # raises if the name is too long
        writing.check_folder(path, "--cache")
    except UserError as error:
        _warn(f"{error}, or 'none'; the plan continues without storing programs")
        return Cache(path if os.path.isdir(path) else None, is_writable=False)
    return Cache(path)


def _warn(text: str) -> None:
    print(f"warning: {printable(text)}", file=sys.stderr, flush=True)


def _family(config: Spec, topology: str) -> str:
    flat = {
        key: value
        for key, value in flatten(config).items()
        if key.startswith(_FAMILY) and key not in _FOLLOWS
    }
    text = json.dumps([topology, importlib.metadata.version("libtpu"), flat], sort_keys=True)
    return _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
