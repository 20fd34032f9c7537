"""The context manager `rejected`, which expects a `UserError` with given fields."""

import contextlib
from collections.abc import Iterator

import pytest

from lamb_tpu.errors import ABSENT, UserError


@contextlib.contextmanager
def rejected(
    key: object,
    value: object = ABSENT,
    problem: str = "",
    remedy: str = "",
    kind: type[UserError] = UserError,
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expects a UserError in the block.

    Args:
      key: the exact key, or '*' followed by the end of the key.
      value: the exact value; if it is left out, any value or no value is accepted.
      problem: text that the problem contains.
      remedy: text that the remedy contains.
      kind: the exception class.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.problem, f"{error} is an error without fields"
    actual = {"key": error.key, "problem": error.problem, "remedy": error.remedy}
    end = str(key).removeprefix("*")
    expected = {
        "key": error.key if end != str(key) and error.key.endswith(end) else str(key),
        "problem": error.problem if problem in error.problem else problem,
        "remedy": error.remedy if remedy in error.remedy else remedy,
    }
    if value is not ABSENT:
        actual["value"], expected["value"] = error.value, value
    assert actual == expected
