"""Measurements of one part of the program, appended to a JSON-lines file without duplicates."""

import argparse
import json
import os
import pathlib
from typing import Any

from lamb_tpu import terminal


class Lines:
    """Appends measurements to a file.

    Args:
      path: the file; several processes may append to it.
      part: name of the part of the program.
    """

    def __init__(self, path: pathlib.Path, part: str) -> None:
        self._path, self._part = path, part
        self._done = set()
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                    self._done.add((record["part"], record["name"]))
                except (ValueError, KeyError):  # a line that a kill cut off
                    continue

    def has(self, name: str) -> bool:
        """Returns whether the file has this measurement already."""
        return (self._part, name) in self._done

    def add(self, name: str, **values: Any) -> None:
        """Appends a measurement, which is then not lost if the program is killed."""
        line = json.dumps({"part": self._part, "name": name, **values})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def parse(program: str, arguments: list[str]) -> argparse.Namespace:
    """Parses the options of a part."""
    parser = terminal.Parser(prog=f"python -m experiments.accelerator.{program}")
    parser.add_argument("--data", metavar="DIR", type=pathlib.Path, required=True)
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU")
    parser.add_argument(
        "--peer", action="store_true", help="internal: measures the peer in this process"
    )
    return parser.parse_all(arguments)
