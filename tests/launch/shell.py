"""Checks of shell text: bash's own, and those of shellcheck where it is installed."""

import pathlib
import shutil
import subprocess
import sysconfig

import pytest

# Expressions in single quotes are for another shell, which is to expand them.
_EXCLUDED = "SC2016"


def parsed(text: str) -> None:
    """Fails where bash cannot read the text."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), text


def checked(text: str) -> None:
    """Fails where shellcheck finds anything; skips the test where it is not installed."""
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
