"""Terminal output that fits 80 columns, argparse options, and failures of standard output."""

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from lamb_tpu import limits
from lamb_tpu.errors import CONTROLS, UserError, escape, hint, printable, shown

# The size of a default terminal window; printed text is wrapped to its width.
COLUMNS, ROWS = 80, 24
# Does not match newlines, which the program prints itself, or the sequence that shows the cursor.
_CONTROLS = re.compile(f"(?!\x1b\\[\\?25h)[{CONTROLS}]")


class Guard:
    """A text stream that escapes control characters; see `errors.printable`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # rich looks up the original stream in this attribute, and writes colours and progress bars
        # unescaped to that stream; `fit` makes the messages of rich safe.
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self._stream.write(escape(text, _CONTROLS))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect() -> None:
    """Wraps stdout and stderr of this process in a `Guard`, so that all printed text is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guard):
            setattr(sys, name, Guard(stream))


def fit(text: str) -> str:
    """Wraps lines longer than `COLUMNS` between words, and escapes control characters.

    Indents continuation lines by 4 more spaces. Never breaks a word, so that paths can be copied.

    >>> print(fit("arrays taken: " + ", ".join(f"layer_{i}/kernel" for i in range(6))))
    arrays taken: layer_0/kernel, layer_1/kernel, layer_2/kernel, layer_3/kernel,
        layer_4/kernel, layer_5/kernel
    """
    return "\n".join(_fit_line(line) for line in escape(text, _CONTROLS).split("\n"))


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Formats rows of equal length as lines with aligned columns, indented by 2.

    `right` has the indices of columns to align to the right, such as numbers.

    >>> print(columns([("batch", "fits"), ("8", "yes")], right=(0,)))
      batch  fits
          8  yes
    """
    rows = [[printable(text) for text in row] for row in rows]
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
    """Rewraps paragraphs and '- ' items with a line longer than `COLUMNS`; keeps indented commands."""
    blocks: list[list[str]] = []
    for line in text.split("\n"):
        if blocks and _goes_on(blocks[-1][0], line):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return "\n".join(_refill(block) for block in blocks)


def respell(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns arguments with every flag spelled as in `known`; - and _ are equivalent.

    Does not change unknown flags, or arguments after `--`, which belong to another program.

    >>> respell(["--time_limit=2h", "--config.batch_size=64"], ["time-limit", "config"])
    ['--time-limit=2h', '--config.batch_size=64']
    """
    spelling = {name.replace("_", "-"): name for name in known}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spelled = []
    for argument in arguments[:end]:
        match = re.fullmatch(r"(--?)([\w-]+)(=.*)?", argument, re.DOTALL)
        name = match and spelling.get(match[2].replace("_", "-"))
        spelled.append(f"{match[1]}{name}{match[3] or ''}" if match and name else argument)
    return [*spelled, *arguments[end:]]


def dashed(text: str) -> str:
    """Replaces _ with - in the flags of a text, but not in config keys.

    >>> dashed("--[no]print_config, --num-processes=1 and --config.batch_size=64")
    '--[no]print-config, --num-processes=1 and --config.batch_size=64'
    """
    return re.sub(
        r"(?<![\w-])--(\[no\])?[a-z]\w*(?![\w.])", lambda match: match[0].replace("_", "-"), text
    )


class CollectedParser(BaseException):
    """Raised in place of parsing while `collecting` is true; `parser` is None for absl flags.

    It is not an Exception, so that handlers of failures do not catch it.
    """

    def __init__(self, parser: argparse.ArgumentParser | None) -> None:
        super().__init__(parser)
        self.parser = parser


# If true, commands raise `CollectedParser` in place of parsing; for `lamb_tpu.completion`.
collecting = False


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError`, and whose help fits `COLUMNS`.

    Rejects abbreviated options. The `description` may be a docstring.
    """

    def __init__(self, description: str = "", **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "allow_abbrev": False,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        }
        super().__init__(description=fit_docstring(description.strip()), **(defaults | settings))

    def option(self, flag: str, text: str, **settings: Any) -> None:
        """Adds an option such as '--output=FILE', or '--run' without a value, with its help text."""
        flag, _, metavar = flag.partition("=")
        if metavar:
            settings["metavar"] = metavar
        self.add_argument(flag, help=text, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses like argparse, but accepts options spelled with - or _."""
        arguments = sys.argv[1:] if args is None else list(args)
        known = [option.lstrip("-") for option in self._option_string_actions]
        return super().parse_known_args(respell(arguments, known), namespace)

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`; argparse would print its usage and exit."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = hint(unknown[1], self._option_string_actions) if unknown else ""
        subject, _, problem = message.partition(": ")
        problem = f": {problem}" if problem else ""
        raise UserError(subject, problem=problem, remedy=f"see --help{near}")

    def parse_all(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Returns the options of a command line; rejects blank values, and text that is not UTF-8.

        An empty path would mean the current folder.
        """
        if collecting:
            raise CollectedParser(self)
        words = sys.argv[1:] if arguments is None else arguments
        check_words(words)
        remedy = "give a value, or omit the flag"
        for word in words:
            if word.startswith("-") and word.endswith("=--"):  # argparse would return an empty list
                raise UserError(word[:-3], problem="must not be --", remedy=remedy)
        options = self.parse_args(arguments)
        for name, value in vars(options).items():
            values = value if isinstance(value, list) else [value]
            if any(isinstance(each, str) and not each.strip() for each in values):
                raise UserError(f"--{name.replace('_', '-')}", problem="is empty", remedy=remedy)
        return options


def check_words(words: Sequence[str]) -> None:
    """Rejects command-line arguments that are not UTF-8.

    Python decodes other bytes to lone surrogates, which cannot be written to files or logs.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            remedy = "use UTF-8, and rename a file or folder whose name is not UTF-8"
            raise UserError(f"the argument {shown(word)}", ..., "is not UTF-8", remedy) from None


def count(least: int = 0, most: int = limits.MAX_COUNT) -> Callable[[str], int]:
    """Returns the argparse type of whole numbers from `least` to `most`."""

    def whole_number(text: str) -> int:
        # `int` accepts at most 4,300 digits.
        if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number")
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{shown(int(text))} is less than {least}")
        if int(text) > most:
            raise argparse.ArgumentTypeError(
                f"{shown(int(text))} is more than {most:,}, the largest valid number"
            )
        return int(text)

    return whole_number


def number(least: float, most: float) -> Callable[[str], float]:
    """Returns the argparse type of numbers from `least` to `most`."""

    def finite_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a number") from None
        if not least <= value <= most:  # also rejects NaN
            raise argparse.ArgumentTypeError(
                f"{value} is not a number from {least:,.15g} to {most:,.15g}"
            )
        return value

    return finite_number


def lose_stdout(error: Exception | None = None) -> str | None:
    """Returns why standard output cannot be written to, or None; on failure, discards its buffer.

    Otherwise writing the buffer would fail again at exit, where no message can be printed. `error` is the
    exception that ended the program; if it may come from a failed write, a newline is written to
    find out.
    """
    try:
        # An OSError from writing to a stream has no file name.
        if isinstance(error, OSError) and error.filename is None:
            sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        return error.strerror
    return None


def _discard(stream: TextIO) -> None:
    # Replace the descriptor, not the stream, whose buffer Python flushes again at exit.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def is_closed_pipe(reason: str | None) -> bool:
    """Returns whether a reason from `lose_stdout` means that the reader, such as `head`, has ended."""
    return reason == os.strerror(errno.EPIPE)


CLOSED_PIPE = 128 + signal.SIGPIPE  # exit status of a program that SIGPIPE ended


def open_missing() -> None:
    """Opens standard streams that the shell has closed, as with `>&-`, and discards their output.

    Otherwise the next file that the program opens, such as a checkpoint, would get a closed stream's number.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def check_current_folder() -> None:
    """Raises a `UserError` if the current folder was removed, because relative paths need it."""
    try:
        os.getcwd()
    except OSError:
        problem = "no longer exists"
        raise UserError("the current folder", ..., problem, "change to another folder") from None


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits with the status that `main` returns, or 2 if its output cannot be written.

    If a reader such as `head` has closed the pipe, exits without a message, with the status `CLOSED_PIPE`.
    """
    open_missing()
    protect()
    status: int | str | None
    try:
        check_current_folder()
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status, reason = 2, lose_stdout()
    except SystemExit as leaving:  # for example from argparse, after --help
        status, reason = leaving.code, lose_stdout()
    except OSError as error:
        if (reason := lose_stdout(error)) is None:
            raise
        # The code below reports the lost output.
        status = 0
    else:
        reason = lose_stdout()
    if is_closed_pipe(reason):
        sys.exit(CLOSED_PIPE)
    if reason is not None and not status:
        print(f"error: standard output cannot be written ({reason})", file=sys.stderr)
        status = 2
    sys.exit(status)


class _Lasting:
    """A standard stream whose failure does not end the program; reports a failure of stdout on stderr."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            _discard(self._stream)
        if self._name == "stdout":
            print(
                f"standard output cannot be written ({error.strerror}); the run continues without it",
                file=sys.stderr,
                flush=True,
            )


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Lets the block continue if the terminal, or the reader of standard output, is gone.

    A run's records and checkpoints are in files, so the run does not need standard output.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (  # type: ignore[assignment]
        stream if isinstance(stream, _Lasting) else _Lasting(stream, name)
        for stream, name in zip(before, ("stdout", "stderr"), strict=True)
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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
