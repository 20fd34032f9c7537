"""Runs the modules and commands from the packages' pages about custom components, in a given folder."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

from tests import commands, tiny

# Overrides that shorten a recipe.
SHORT = (
    "--config.duration=60 steps",
    "--config.checkpoint.every=50 percent",
    "--config.log.tensorboard=False",
    "--config.eval.every=100 percent",
)


def text(package: str) -> str:
    return (tiny.ROOT / "lamb_tpu" / package / "README.md").read_text()


def write_modules(page: str, folder: pathlib.Path) -> list[str]:
    """Writes a page's modules (blocks that begin with a file name), and returns their file names."""
    actual = re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", page, re.DOTALL)
    for name, code in actual:
        (folder / name).write_text(code)
    return [name for name, _ in actual]


def command_lines(page: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(lamb_tpu .*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    actual = [shlex.split(line)[1:] for line in lines]
    assert actual
    return [[f"lamb_tpu.{name}", *arguments] for name, *arguments in actual]


def run(lines: list[list[str]], folder: pathlib.Path, devices: int = 1) -> list[dict[str, Any]]:
    """Runs commands, each [module, argument, ...], one after the other in the folder."""
    listed = folder / "lines.json"
    listed.write_text(json.dumps(lines))
    done = subprocess.run(
        [sys.executable, "-m", commands.__name__, str(listed)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tiny.ROOT), "JAX_NUM_CPU_DEVICES": str(devices)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(listed.read_text())


def prepare_page(package: str, folder: pathlib.Path, *changes: str) -> list[list[str]]:
    """Writes the modules of a page; returns its commands, with the overrides `SHORT`."""
    page = text(package)
    assert write_modules(page, folder)
    return [
        [*line, *SHORT, *changes] if line[0] == "lamb_tpu.train" else line
        for line in command_lines(page)
    ]


def succeed(lines: list[list[str]], folder: pathlib.Path) -> list[dict[str, Any]]:
    outcomes = run(lines, folder)
    for line, outcome in zip(lines, outcomes, strict=True):
        assert outcome["status"] == 0, (line, outcome["stderr"])
    return outcomes


def run_page(package: str, folder: pathlib.Path, *changes: str) -> list[list[str]]:
    """Writes a page's modules, runs its commands with the overrides `SHORT`, and returns the commands."""
    lines = prepare_page(package, folder, *changes)
    succeed(lines, folder)
    return lines
