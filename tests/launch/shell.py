"""Checks shell scripts with bash and, if it is installed, with shellcheck."""

import pathlib
import shutil
import subprocess
import sysconfig

import pytest

# SC2016 warns about expressions in single quotes. They are intended: a host's shell expands them.
_EXCLUDED = "SC2016"


def parsed(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), text


def checked(text: str) -> None:
    """Fails if bash or shellcheck reports anything; skips the test if shellcheck is missing."""
    parsed(text)
    scripts = sysconfig.get_path("scripts")
    program = shutil.which("shellcheck", path=scripts) or shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed; it comes with the extra test")
    assert pathlib.Path(program).exists()
    done = subprocess.run(
        [program, "--shell=bash", f"--exclude={_EXCLUDED}", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
