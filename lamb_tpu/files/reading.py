"""Reading of files that users name, with short reasons for failures."""

import errno
import json
import os
import pathlib
import re
import stat
from typing import Any, TypeGuard

from lamb_tpu.files import buckets

Path = str | os.PathLike[str]
_UTF_8 = "utf-8-sig"  # UTF-8 with or without a byte-order mark
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


def kind(path: Path) -> str | None:
    """Returns the kind of a path, following links: 'a file', 'a folder', 'a pipe' ...

    Returns None if nothing is there.

    Raises:
      OSError: the kind cannot be determined, such as of a link to itself.
    """
    if _in_bucket(path):
        return buckets.kind(path)
    try:
        return _KINDS[stat.S_IFMT(os.stat(path).st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        # NotADirectoryError: a parent of the path is a file.
        return None


def read_text(path: Path, errors: str = "strict") -> str:
    """Reads a regular file. Others are refused: a pipe may block, and a device may have no end.

    A byte-order mark at the start, which Windows editors write, is stripped.

    Args:
      path: path of the file.
      errors: treatment of bytes that are not UTF-8, as in `open`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a regular file, cannot be read, or is not UTF-8; the message is the
        reason.
    """
    try:
        if _in_bucket(path):
            return buckets.read(path).decode(_UTF_8, errors=errors)
        # Asked before the file is opened: opening a pipe waits for a writer.
        found = kind(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if found != "a file":
            raise ValueError(f"it is {found}, not a file")
        return pathlib.Path(path).read_text(encoding=_UTF_8, errors=errors)
    except FileNotFoundError:
        # A subclass of OSError. Callers treat a missing file differently.
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def read_json(path: Path) -> Any:
    """Reads a file of JSON. Raises as `read_text`, and a ValueError if it is not JSON."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Parses a text of JSON.

    Raises:
      ValueError: the text is not JSON, or is nested too deep; the message is the reason.
    """
    try:
        return json.loads(text)
    except RecursionError:
        # Python's parser recurses into nested lists and objects.
        raise ValueError("it is nested too deep") from None


def _in_bucket(path: Path) -> TypeGuard[pathlib.Path]:
    # A text is a path of this machine until `buckets.parse` has read it.
    return isinstance(path, pathlib.PurePath) and buckets.is_remote(path)


def has_pattern(path: pathlib.Path) -> bool:
    """Returns whether a path has characters that `glob` does not take literally."""
    return re.search(r"[\[\]*?]", str(path)) is not None
