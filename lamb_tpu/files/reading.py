"""Reads files that users name; what is wrong with one is told in a few words."""

import errno
import json
import os
import pathlib
import re
import stat
from typing import Any

Path = str | os.PathLike[str]
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: "a file",
}


def kind(path: Path) -> str | None:
    """The kind of a path, links followed: 'a file', 'a folder', 'a pipe' ...; None: nothing.

    Raises:
      OSError: it cannot be told, as of a link to itself.
    """
    try:
        return _KINDS[stat.S_IFMT(os.stat(path).st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of an ordinary file; a pipe would be waited for, and a device has no end.

    Args:
      path: of the file.
      errors: what becomes of bytes that are not UTF-8, as `open` has it.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no ordinary file, cannot be read or is not UTF-8; the message is the reason.
    """
    try:
        found = kind(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if found != "a file":
            raise ValueError(f"it is {found}, not a file")
        return pathlib.Path(path).read_text(encoding="utf-8", errors=errors)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def read_json(path: Path) -> Any:
    """Reads a file of JSON. Raises as `read_text`, and a ValueError where it is not JSON."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Parses a text of JSON.

    Raises:
      ValueError: it is not JSON, or is nested deeper than can be read; the message is the reason.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def has_pattern(path: pathlib.Path) -> bool:
    """Tells whether a path has characters that `glob` does not take literally."""
    return re.search(r"[\[\]*?]", str(path)) is not None
