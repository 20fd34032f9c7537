"""Pages on parts of a user's own: their modules and commands, run in a folder outside the package."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

from tests import commands, tiny

# Fewer updates than the recipe's.
SHORT = (
    "--config.duration=60 steps",
    "--config.checkpoint.every=50 percent",
    "--config.log.tensorboard=False",
    "--config.eval.every=100 percent",
)


def text(room: str) -> str:
    return (tiny.ROOT / "lamb_tpu" / room / "README.md").read_text()


def write_modules(page: str, folder: pathlib.Path) -> list[str]:
    """Writes the page's modules, the blocks that begin with their file's name; the names."""
    found = re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", page, re.DOTALL)
    for name, code in found:
        (folder / name).write_text(code)
    return [name for name, _ in found]


def command_lines(page: str) -> list[list[str]]:
    """The page's commands, [module, argument, ...] each."""
    blocks = re.findall(r"```sh\n(lamb_tpu .*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line)[1:] for line in lines]
    assert found
    return [[f"lamb_tpu.{name}", *arguments] for name, *arguments in found]


def run(lines: list[list[str]], folder: pathlib.Path, devices: int = 1) -> list[dict[str, Any]]:
    """Outcomes of commands, [module, argument, ...] each, run one after the other in the folder."""
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


def run_page(room: str, folder: pathlib.Path, *changes: str) -> list[list[str]]:
    """Runs the commands of a page as it has them, but for fewer updates; returns them."""
    page = text(room)
    assert write_modules(page, folder)
    lines = [
        [*line, *SHORT, *changes] if line[0] == "lamb_tpu.train" else line
        for line in command_lines(page)
    ]
    for line, outcome in zip(lines, run(lines, folder), strict=True):
        assert outcome["status"] == 0, (line, outcome["stderr"])
    return lines
