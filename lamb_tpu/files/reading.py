"""Reads files that users name; each error message is a short reason.

All text, JSON and TOML files from users are read here. They must be regular files of limited size,
in UTF-8 with or without a byte-order mark. The nesting of JSON and TOML is limited too.
"""

import errno
import io
import json
import os
import pathlib
import re
import stat
import tomllib
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from lamb_tpu.files import buckets

Path = str | os.PathLike[str]
ValueT = TypeVar("ValueT")
# Default limits of files that are read into memory: settings in JSON or TOML, and longer files such
# as lists, records and texts. A corpus is read as a stream, with `open_file`.
MAX_SETTINGS_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 2**30
MAX_DEPTH = 100  # levels of nested lists and objects; deeper values break recursive code
_TOO_DEEP = f"it is nested too deeply, more than {MAX_DEPTH} levels"
_UTF_8 = "utf-8-sig"  # UTF-8 with or without a byte-order mark
TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


def kind(path: Path) -> str | None:
    """Returns the type of a path, following links: 'a file', 'a folder' ...; None for a missing path.

    Raises an OSError if the type cannot be determined, such as for a link to itself.
    """
    if _in_bucket(path):
        return buckets.kind(path)
    try:
        return TYPES[stat.S_IFMT(os.stat(path).st_mode)]
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # NotADirectoryError: a parent of the path is a file. ValueError: the name is invalid, because
        # it has a NUL or a lone surrogate.
        return None


def open_file(path: Path) -> io.BufferedReader:
    """Opens a regular file to read its bytes; never waits for a pipe.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the path is not a regular file, or cannot be opened; the message is the reason.
    """
    try:
        # Check the type before opening: opening a device may rewind a tape or block.
        path_type = kind(path)
        if path_type is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        _check_kind(path_type)
        # A pipe may have replaced the file since. O_NONBLOCK opens it at once, to check its type.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_kind(TYPES[stat.S_IFMT(os.fstat(descriptor).st_mode)])
        except ValueError:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")
    except FileNotFoundError:
        # Re-raised, although it is an OSError: callers treat a missing file differently.
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Reads a file or bucket object. Raises the errors of `open_file`, and ValueError if it is too large."""
    try:
        if _in_bucket(path):
            content = buckets.read(path)
        else:
            with open_file(path) as file:
                # Check before memory is allocated, and again below, because files of /proc report 0.
                _check_size(os.fstat(file.fileno()).st_size, max_bytes)
                content = file.read(max_bytes + 1)
        _check_size(len(content), max_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    return content


def read_text(path: Path, errors: str = "strict", max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Reads a regular UTF-8 file. Rejects pipes, which may block, and devices, which never end.

    A byte-order mark at the start, which Windows editors write, is stripped. The line ends "\\r\\n"
    and "\\r" become "\\n". Raises the same errors as `read_bytes`, and ValueError if the text is not
    valid; the message has the number of the first invalid line.

    Args:
      path: path of the file.
      errors: treatment of bytes that are not UTF-8, as in `open`. If 'strict', a NUL byte is an
        error too: the file is not text.
      max_bytes: the maximum size of the file.
    """
    return decode(read_bytes(path, max_bytes), errors)


def decode(content: bytes, errors: str = "strict") -> str:
    """Decodes a text file's content, see `read_text`; raises a ValueError with the invalid line's number."""
    try:
        text = content.decode(_UTF_8, errors)
    except UnicodeDecodeError as error:
        # The decoder counts bytes from the end of the byte-order mark.
        at = error.start + len(content) - len(error.object)
        raise ValueError(
            f"line {_line_at(content, at)} is not UTF-8 (byte 0x{content[at]:02x}: {error.reason})"
        ) from None
    if errors == "strict" and "\0" in text:
        raise ValueError(
            f"line {_line_at(content, content.index(0))} has a NUL byte, so the file is not text"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Reads a JSON file. Raises the same errors as `read_text`, and ValueError if the file is not JSON."""
    return parse_json(read_text(path, max_bytes=max_bytes))


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises the same errors as `read_text`, and ValueError if the file is not TOML."""
    return _parse(tomllib.loads, read_text(path, max_bytes=MAX_SETTINGS_BYTES))


def parse_json(text: str) -> Any:
    """Parses JSON text; raises a ValueError with the reason if the text is not valid."""
    return _parse(json.loads, text)


def _parse(loads: Callable[[str], ValueT], text: str) -> ValueT:
    try:
        return _check_depth(loads(text))
    except RecursionError:  # Python's parsers are recursive
        raise ValueError(_TOO_DEEP) from None


def _check_kind(path_type: str) -> None:
    if path_type != "a file":
        raise ValueError(f"it is {path_type}, not a file")


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"it has more than {most / 2**20:,.4g} MiB, which is the size limit")


def _check_depth(value: ValueT) -> ValueT:
    # Go level by level: recursion into a deep value would exceed Python's limit.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return value
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    raise ValueError(_TOO_DEEP)


def _line_at(content: bytes, position: int) -> int:
    return content.count(b"\n", 0, position) + 1


def _in_bucket(path: Path) -> TypeGuard[pathlib.Path]:
    # A str is a path on this machine; `buckets.parse` returns a Path for a bucket.
    return isinstance(path, pathlib.PurePath) and buckets.is_remote(path)


def has_pattern(path: pathlib.Path) -> bool:
    """Returns whether a path has characters that `glob` treats as a pattern."""
    return re.search(r"[\[\]*?]", str(path)) is not None
