"""Files that users name or move about, and stdout: what may be wrong with them, in a sentence."""

import argparse
import contextlib
import errno
import json
import os
import pathlib
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lamb_tpu.errors import UserError

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
    """Reads a file of JSON. Raises as `read_text`, and a ValueError where it is no JSON."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Parses a text of JSON.

    Raises:
      ValueError: it is no JSON, or is nested deeper than can be read; the message is the reason.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@contextlib.contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Lets a failure to write become a UserError that begins with the flag that named the path."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{key} {path} cannot be written ({error.strerror or error}); give another"
        ) from None


def refuse_empty(options: argparse.Namespace) -> argparse.Namespace:
    """The options of a command line, none of them an empty text: as a path, it is where one is.

    Raises:
      UserError: naming the one that is.
    """
    for name, value in vars(options).items():
        if value == "" or (isinstance(value, list) and "" in value):
            raise UserError(
                f"--{name.replace('_', '-')} is empty; give a value, or leave it out"
            )
    return options


def lose_stdout(error: Exception | None = None) -> str | None:
    """Why standard output cannot be written, where that is so; from here on nothing goes there.

    Else what waits in its buffer would fail again at exit, where nobody can tell it.

    Args:
      error: what has ended the program; where it can have come from a write, one is tried.
    """
    try:
        if isinstance(error, OSError) and error.filename is None:
            sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror
    return None


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Exits with what a command's main function returns, and 2 where its output cannot be told.

    A reader that has seen enough, such as `head`, ends it without a word, as SIGPIPE would.
    """
    try:
        status = main()
    except OSError as error:
        if (reason := lose_stdout(error)) is None:
            raise
        status = 0
    else:
        reason = lose_stdout()
    if reason == os.strerror(errno.EPIPE):
        sys.exit(128 + signal.SIGPIPE)
    if reason is not None and not status:
        print(f"error: standard output cannot be written ({reason})", file=sys.stderr)
        status = 2
    sys.exit(status)
