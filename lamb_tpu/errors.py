"""Exceptions for the user: errors in the input, and requests to end a run."""

import contextlib
import difflib
import itertools
import os
import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

# Characters that a terminal acts on, or that hide or reorder the text after them: controls except tab,
# direction marks, Unicode line separators, and lone surrogates, which cannot be encoded.
CONTROLS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff"
)
_NOT_PRINTABLE = re.compile(f"[{CONTROLS}\n]")
_LONGEST = 100  # characters of a value in a message
_DEEPEST = 3  # levels of nested lists and dictionaries that a message shows
_MOST, _LAST = 4000, 1000  # longest message, in characters; length of its end, which is not cut
ABSENT = ...  # the value of an error that shows no value


def printable(text: str) -> str:
    """Makes a text safe to print on one line.

    File names, records and tables may come from other people, and a control character in them could
    change the terminal or forge a line of output. Replaces each such character with the escape that
    `repr` shows, and cuts the middle out of a long text.
    """
    if len(text) > _MOST:
        left_out = len(text) - _MOST
        text = f"{text[: _MOST - _LAST]} ... ({left_out:,} characters) ... {text[-_LAST:]}"
    return escape(text, _NOT_PRINTABLE)


def escape(text: str, characters: re.Pattern[str]) -> str:
    r"""Replaces the characters that match a pattern with escapes such as \n or \u202e."""
    return characters.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shown(value: object) -> str:
    """Formats a value for a message: its `repr`, shortened if it is long. Never fails.

    >>> shown("digits"), shown(10**5000), shown([[[[1]]]])
    ("'digits'", 'a number of more than 3,900 digits', '[[[...]]]')
    """
    return _cut(_shown(value, _DEEPEST))


def _shown(value: object, depth: int) -> str:
    # Not `repr` alone: it recurses without limit, and raises for integers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 13_000:
        return "a number of more than 3,900 digits"
    if isinstance(value, (list, tuple, dict)) and not depth:
        return "..."
    if isinstance(value, dict):
        pairs = _first(value.items())
        items = [f"{_shown(key, 0)}: {_shown(item, depth - 1)}" for key, item in pairs]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        text = ", ".join(_shown(item, depth - 1) for item in _first(value))
        single = "," if len(value) == 1 else ""
        return f"[{text}]" if isinstance(value, list) else f"({text}{single})"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (str, bytes)):
        return repr(value[: _LONGEST + 1])
    return " ".join(repr(value).split())  # the repr of a ConfigDict has several lines


def _first(values: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(values, _LONGEST))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST + 2 else f"{text[: _LONGEST - 3]}..."


class UserError(Exception):
    """An error that the user can correct; its fields form one sentence.

    Commands print it without a traceback and exit with status 2. The text is safe to print, whatever
    the values contain; see `printable`.

    >>> print(UserError("config.batch_size", 0, "is out of range", "use at least 1"))
    config.batch_size=0 is out of range; use at least 1
    >>> print(UserError("WORKDIR /nowhere", problem="holds no run", remedy="give another folder"))
    WORKDIR /nowhere holds no run; give another folder
    >>> print(UserError("label of example 3", 12, "is out of range", "correct the data set"))
    label of example 3 is 12, which is out of range; correct the data set

    Args:
      key: subject of the sentence: a config key, a flag or a file, which the user can change.
      value: the rejected value; ABSENT: the message shows no value.
      problem: predicate of the sentence, such as 'is out of range'. No space precedes it if it begins
        with one of ':,=['.
      remedy: a command to the user, such as 'use at least 1'; '': none.
    """

    def __init__(
        self, key: object = "", value: object = ABSENT, problem: str = "", remedy: str = ""
    ) -> None:
        super().__init__(str(key), value, problem, remedy)
        self.key, self.value, self.problem, self.remedy = self.args

    def __str__(self) -> str:
        text = self.key
        if self.value is not ABSENT:  # 'key=value' for one word, else 'key is value, which'
            in_words = " " in text.rpartition(": ")[2]
            text += f" is {shown(self.value)}, which" if in_words else f"={shown(self.value)}"
        if self.problem:
            text += f"{'' if self.problem[0] in ':,=[' else ' '}{self.problem}"
        return printable(f"{text}; {self.remedy}" if self.remedy else text)

    def at(self, key: str) -> "UserError":
        """Returns a copy of this error whose key begins with `key`, a section or file."""
        is_field = isinstance(self, ArgumentError) and self.key.isidentifier()
        return UserError(f"{key}{'.' if is_field else ': '}{self.key}", *self.args[1:])


class ArgumentError(UserError, ValueError):
    """An error in an argument of a library function; it is also a ValueError. See `naming`."""


class Preempted(BaseException):
    """SIGTERM asked the run to end; the run resumes when it is started again.

    Commands exit with status 75, `os.EX_TEMPFAIL`. Like KeyboardInterrupt, this is not an Exception.
    """


class Interrupted(Preempted):
    """Ctrl-C asked the run to end. Differs from `Preempted` only in the exit status, which is 130."""


@contextlib.contextmanager
def naming(key: str, fields: Container[str] = ()) -> Iterator[None]:
    """Turns an error that a wrong value raises in the block into a UserError that names a key.

    If the message begins with one of `fields`, such as 'eps=-1 must be', the error names 'KEY.eps'.
    """
    try:
        yield
    except UserError as error:
        if error.key.startswith("config."):
            raise
        raise error.at(key) from error
    except (ValueError, TypeError, ArithmeticError) as error:
        problem, _, remedy = " ".join(str(error).split()).partition("; ")
        field = re.match(r"(\w+)(?=[=\[])", problem)
        if field and field[1] in fields:
            key, problem = f"{key}.{field[1]}", problem[field.end() :]
        else:
            problem = f": {problem}"
        raise UserError(key, problem=problem, remedy=remedy) from error


def unknown(key: object, value: object, known: Iterable[object]) -> UserError:
    """Returns the error for an unknown name.

    >>> print(unknown("config.data.name", "digit", ["digits", "mnist", "lm"]))
    config.data.name='digit' is unknown; use digits, mnist or lm; did you mean digits?
    """
    names = [str(name) or "''" for name in known]
    return UserError(key, value, "is unknown", f"use {listed(names)}{hint(str(value), names)}")


def unknown_key(section: str, key: str, known: Iterable[str], owner: str = "") -> UserError:
    """Returns the error for a key that a section of the config does not have.

    >>> print(unknown_key("config.eval", "evry", ["every", "batch_size"]))
    config.eval.evry is unknown; config.eval has: every, batch_size; did you mean config.eval.every?

    `owner`, such as "optimizer 'lamb'", replaces the section before 'has:' in the message.
    """
    names = list(known)
    has = f"{owner or section} has: {', '.join(names) or 'no keys'}"
    return UserError(
        f"{section}.{key}", ABSENT, "is unknown", has + hint(key, names, f"{section}.")
    )


def out_of_range(key: object, value: object, valid: str) -> UserError:
    """Returns the error for a number out of range; `valid` is the range, such as 'at least 1'."""
    return UserError(key, value, "is out of range", f"use {valid}")


def not_divisible(key: object, size: int, parts: int, of: str) -> UserError:
    """Returns the error for a size that is not a multiple of `parts`, which `of` describes.

    >>> print(not_divisible("config.batch_size", 100, 8, "the 8 devices of config.mesh"))
    config.batch_size=100 is not divisible by the 8 devices of config.mesh; use 96 or 104
    """
    below, above = size // parts * parts, -(-size // parts) * parts
    near = f"{below} or {above}" if below else f"{above}"
    return UserError(key, size, f"is not divisible by {of}", f"use {near}")


def unreadable(path: object, error: BaseException, remedy: str, problem: str = "") -> UserError:
    """Returns the error for a file that cannot be read, with the operating system's reason.

    `problem` replaces the predicate 'cannot be read'.
    """
    return UserError(
        path, problem=f"{problem or 'cannot be read'} ({reason(error)})", remedy=remedy
    )


def reason(error: BaseException) -> str:
    """Returns the text of an exception on one line, without the file name of an OSError."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text or type(error).__name__


def listed(names: Iterable[object], word: str = "or") -> str:
    """Joins names into a list for a sentence.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b or c', 'a')
    """
    *first, last = [*map(str, names)] or ["nothing"]
    return f"{', '.join(first)} {word} {last}" if first else last


def hint(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns a question about the nearest known word, for the end of a message; '' if no word is near.

    >>> hint("batchsize", ["batch_size", "seed"], "config.")
    '; did you mean config.batch_size?'
    """
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
