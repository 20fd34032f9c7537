"""Tests that tests compile with fast options, and tests marked `optimized` with XLA's defaults."""

import subprocess
import sys
from typing import Any

import jax
import pytest
from jax._src import compiler

from tests import compiling

# Prints XLA's options in a new process.
PRINT = """
from jax._src.compiler import get_compile_options
options = get_compile_options(1, 1)
print(options.executable_build_options.debug_options)
"""


def in_text(text: str) -> dict[str, str]:
    """Returns the options of `compiling` from a text with one line per XLA option."""
    of_xla = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return {name: of_xla[name] for name in compiling.OPTIONS}


def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the options with which this process compiles now."""
    made = []
    get = compiler.get_compile_options

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(get(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(compiler, "get_compile_options", recorded)
    jax.jit(lambda: 0).lower().compile()
    overrides = {name: str(value).lower() for name, value in made[0].env_option_overrides}
    return in_text(str(made[0].executable_build_options.debug_options)) | overrides


def expected(column: int) -> dict[str, str]:
    return {name: str(values[column]).lower() for name, values in compiling.OPTIONS.items()}


def test_tests_compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch) == expected(0)


@pytest.mark.optimized
def test_marked_tests_compile_as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    of_users = in_text(subprocess.check_output([sys.executable, "-c", PRINT], text=True))
    assert given(monkeypatch) == of_users == expected(1)
