"""Terminal output: text that fits 80 columns, options of small commands, lost standard output."""

import argparse
import errno
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from lamb_tpu.errors import UserError

# The size of a plain terminal window, to which all printed text is fitted.
COLUMNS, ROWS = 80, 24


def fit(text: str) -> str:
    """Wraps lines longer than `COLUMNS` between words; continuation lines are indented by 4 more.

    A word is never broken, so that a path can be copied. Lines that fit are left alone.

    >>> print(fit("arrays taken: " + ", ".join(f"layer_{i}/kernel" for i in range(6))))
    arrays taken: layer_0/kernel, layer_1/kernel, layer_2/kernel, layer_3/kernel,
        layer_4/kernel, layer_5/kernel
    """
    return "\n".join(_fit_line(line) for line in text.split("\n"))


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Returns rows of texts as lines with aligned columns, indented by 2.

    Args:
      rows: the rows, of equal lengths.
      right: the columns that are aligned to the right, as numbers are; the first is 0.

    >>> print(columns([("run", "loss"), ("digits", "12.5")]))
      run     loss
      digits  12.5
    >>> print(columns([("batch", "fits"), ("8", "yes")], right=(0,)))
      batch  fits
          8  yes
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  "
        + "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def fit_docstring(text: str) -> str:
    """Rewraps the paragraphs and '- ' items that have a line longer than `COLUMNS`.

    Other indented lines, such as commands, are left alone.
    """
    blocks: list[list[str]] = []
    for line in text.split("\n"):
        if blocks and _goes_on(blocks[-1][0], line):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return "\n".join(_refill(block) for block in blocks)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence; it has no abbreviations of options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**({"allow_abbrev": False} | settings))

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`, where argparse would print its usage and end the process."""
        raise UserError(f"{message}; see --help")

    def parse_all(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Returns the options of a command line.

        Raises:
          UserError: a mistake, or an option whose value is an empty text: an empty path would be
            the current folder.
        """
        options = self.parse_args(arguments)
        for name, value in vars(options).items():
            if value == "" or (isinstance(value, list) and "" in value):
                self.error(f"--{name.replace('_', '-')} is empty; give a value, or leave it out")
        return options


def lose_stdout(error: Exception | None = None) -> str | None:
    """Returns why standard output cannot be written, or None; then discards what it holds.

    Otherwise the buffer would fail again at exit, where no message can be printed.

    Args:
      error: the error that ended the program. If a write can have raised it, a write is tried.
    """
    try:
        # A failed write to a stream gives an error without a file name.
        if isinstance(error, OSError) and error.filename is None:
            sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        # The descriptor is replaced, not `sys.stdout`, whose buffer Python flushes again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror
    return None


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Exits with the status that `main` returns, or 2 if its output cannot be written.

    If a reader such as `head` has closed the pipe, exits without a message, as SIGPIPE would.
    """
    try:
        status = main()
    except OSError as error:
        if (reason := lose_stdout(error)) is None:
            raise
        # Lost output counts as a failure below, with a message of its own.
        status = 0
    else:
        reason = lose_stdout()
    if reason == os.strerror(errno.EPIPE):
        sys.exit(128 + signal.SIGPIPE)
    if reason is not None and not status:
        print(f"error: standard output cannot be written ({reason})", file=sys.stderr)
        status = 2
    sys.exit(status)


def _fit_line(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return _fill(line, f"{indent}    ") if len(line) > COLUMNS else line


def _goes_on(first: str, line: str) -> bool:
    """Returns whether a line continues the paragraph or item that begins with `first`."""
    if not first or not line:
        return False
    if first.startswith("- "):
        return line.startswith("  ")
    return not first.startswith(" ") and not line.startswith((" ", "- "))


def _refill(block: list[str]) -> str:
    if max(map(len, block)) <= COLUMNS or block[0].startswith(" "):
        return "\n".join(block)
    hanging = "  " if block[0].startswith("- ") else ""
    return _fill(" ".join(line.strip() for line in block), hanging)


def _fill(line: str, indent: str) -> str:
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
