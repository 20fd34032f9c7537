"""Bad inputs: working command lines and their files, each with one change."""

import dataclasses
import json
import os
import pathlib
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Special files, by the text that represents them in `Input.files`.
FOLDER, PIPE, DEVICE, LOOP, DANGLING = "<folder>", "<pipe>", "<device>", "<loop>", "<dangling>"
SPECIAL = (FOLDER, PIPE, DEVICE, LOOP, DANGLING)

# Replacements of an argument's value, by the name of the change. '@' is the input's folder; `make`
# writes the files that these values name into this folder.
WORDS: Mapping[str, str] = {
    "empty": "",
    "blank": "  ",
    "words": "two words",
    "zero": "0",
    "negative": "-1",
    "fraction": "1.5",
    "30 digits": "9" * 30,
    "4,500 digits": "9" * 4_500,
    "10**12": str(10**12),
    "1e308": "1e308",
    "1e400": "1e400",
    "nan": "nan",
    "infinity": "inf",
    "digits that are not ASCII": "\u0661\u0662",
    "control characters": "a\x1b[31mb\nc\rd",
    "not UTF-8": "a\udcff",
    "5,000 characters": "x" * 5_000,
    "quotes and braces": "'\"{}%s$(touch mark)`",
    "list": "[1, 2]",
    "tuple of a tuple": "((0, 64.0),)",
    "nested 3,000 deep": "(" * 3_000 + ")" * 3_000,
    "mapping": "{'name': ['x']}",
    "None": "None",
    "missing path": "@/missing/x",
    "folder": "@/odd.folder",
    "pipe": "@/odd.pipe",
    "link to a device": "@/odd.device",
    "link to itself": "@/odd.loop",
    "dangling link": "@/odd.dangling",
    "text file": "@/odd.txt",
    "path below a file": "@/odd.txt/x",
    "custom name": "module:function",
    "comma": ",",
    "colon": ":",
    "equals sign": "=",
    "hyphens": "--",
    "range": "9..1",
    "seconds": "1000000000000h",
    "duration": "1e30 epochs",
}
_ODD = {
    "odd.folder": FOLDER,
    "odd.pipe": PIPE,
    "odd.device": DEVICE,
    "odd.loop": LOOP,
    "odd.dangling": DANGLING,
    "odd.txt": "text\n",
}

# Replacements of a value in a JSON document, by the name of the change.
JSON: Mapping[str, Any] = {
    "null": None,
    "true": True,
    "string": "x",
    "empty string": "",
    "number": 5,
    "negative number": -1,
    "fraction": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "10**400": 10**400,
    "10**12": 10**12,
    "list": [],
    "list of lists": [[], ["x"]],
    "mapping": {},
    "mapping of odd keys": {"": {"\x1b[31m": [None]}},
    "control characters": "a\x1b[31m\nb",
    "custom name": "module:function",
    "nested": [[[[[[[["x"]]]]]]]],
    "lone surrogate": "\ud800",
}
# TOML literals that replace a value.
TOML: Mapping[str, str] = {
    "string": '"x"',
    "empty string": '""',
    "true": "true",
    "number": "5",
    "negative": "-4",
    "10**12": str(10**12),
    "4,500 digits": "9" * 4_500,
    "nan": "nan",
    "infinity": "inf",
    "fraction": "0.5",
    "list": "[]",
    "list of lists": '[["x"], []]',
    "table": "{}",
    "table of a table": "{x = {y = [1]}}",
    "date": "1979-05-27",
    "step": '"step"',
    "kind": '"kind"',
    "control characters": '"a\\u001b[31mb\\nc"',
    "custom name": '"os:system"',
    "path upward": '"../../x"',
    "nested 500 deep": "[" * 500 + "]" * 500,
    "nested 20,000 deep": "[" * 20_000 + "]" * 20_000,
}


@dataclasses.dataclass(frozen=True)
class Input:
    """A command line with one change.

    Attributes:
      area: the area, such as 'images'.
      change: the type of the change, such as 'truncated'.
      location: what is changed, such as a file, key or argument.
      module: name of the command's module, as for `python -m`.
      arguments: the command's arguments; '@' is the folder of the input.
      bases: names of prepared folders to copy into the input's folder.
      files: further files by name: text, bytes, one of `SPECIAL`, or a function of the file's current bytes.
      environment: variables to set.
      statuses: exit statuses that need no error message.
      setting: name of a change to the process, a key of `areas.processes.SETTINGS`; '' if none.
      signals: a signal to send to the command, and the seconds from the start to the signal.
    """

    area: str
    change: str
    location: str
    module: str
    arguments: Sequence[str]
    bases: Sequence[str] = ()
    files: Mapping[str, str | bytes | Callable[[bytes], bytes]] = dataclasses.field(
        default_factory=dict
    )
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    statuses: frozenset[int] = frozenset()
    setting: str = ""
    signals: tuple[int, float] | None = None

    def command(self) -> str:
        """Returns the command as one line, with long words shortened."""
        words = (
            word if len(word) <= 80 else f"{word[:60]}...({len(word)})"
            for word in map(ascii, self.arguments)
        )
        return f"python -m {self.module} {' '.join(words)}"


def make(given: Input, folder: pathlib.Path, prepared: pathlib.Path) -> None:
    """Writes the files of an input into its folder."""
    for name in given.bases:
        shutil.copytree(prepared / name, folder / name, symlinks=True)
    for name, content in {**_ODD, **given.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content = content(path.read_bytes() if path.is_file() else b"")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        match content:
            case "<folder>":
                path.mkdir()
            case "<pipe>":
                os.mkfifo(path)
            case "<device>":
                path.symlink_to("/dev/zero")
            case "<loop>":
                path.symlink_to(path)
            case "<dangling>":
                path.symlink_to(folder / "nothing" / "here")
            case bytes():
                path.write_bytes(content)
            case _:
                path.write_text(content)


def flag(name: str, value: str) -> str:
    """Returns --name=value."""
    return f"--{name}={value}"


def change_json(rng: random.Random, text: str) -> tuple[str, str, str]:
    """Changes one value of a JSON document; returns the new document, the change, and the value's key."""
    document = [json.loads(text)]  # in a list, so that the document itself is also a candidate
    parent, key = rng.choice(_elements(document))
    change, value = rng.choice(list(JSON.items()))
    share = rng.random() if isinstance(parent, dict) else 1.0
    if share < 0.08:
        change = "key missing"
        del parent[key]
    elif share < 0.12:
        change = "key unknown"
        parent[f"{key}x"] = parent.pop(key)
    else:
        parent[key] = value
    where = "the document" if parent is document else str(key)
    return json.dumps(document[0]), change, where


def change_line(rng: random.Random, text: str) -> tuple[str, str, str]:
    """Changes a value in one line of a JSON-lines text; see `change_json`."""
    lines = text.splitlines()
    number = rng.randrange(len(lines))
    lines[number], change, location = change_json(rng, lines[number])
    return "\n".join(lines) + "\n", change, location


def damage(
    rng: random.Random, prepared: pathlib.Path, name: str, share: float = 0.35
) -> tuple[str | Callable[[bytes], bytes], str, str]:
    """Returns damaged content of a prepared file, the change, and the location of the change.

    In a JSON file, a value is changed; with probability `share`, bytes are damaged instead. The content
    can be a function of the old content.
    """
    if name.endswith((".json", ".jsonl")) and rng.random() >= share:
        change = change_line if name.endswith(".jsonl") else change_json
        text, what, where = change(rng, (prepared / name).read_text())
        return text, what, f"{name} {where}"
    what, content = damages(rng)
    return content, what, name


def _elements(node: Any) -> list[tuple[Any, Any]]:
    elements = []
    for key in node if isinstance(node, dict) else range(len(node)):
        elements.append((node, key))
        if isinstance(node[key], (dict, list)) and node[key]:
            # Descend only into the first element of a list, so that long lists do not dominate.
            below = _elements(node[key])
            elements += below if isinstance(node, dict) or key == 0 else []
    return elements


def damages(rng: random.Random) -> tuple[str, str | Callable[[bytes], bytes]]:
    """Draws a change for any file: the change's name, and new content or a function of the old content."""
    number = rng.random()
    return rng.choice(
        [
            ("truncated", lambda data: data[: int(number * len(data))]),
            ("emptied", lambda data: b""),
            ("zeros in the middle", lambda data: _within(data, number, bytes(64))),
            (
                "random bytes",
                lambda data: _within(data, number, random.Random(number).randbytes(48)),
            ),
            ("one bit", lambda data: _bit(data, number)),
            ("byte-order mark", lambda data: b"\xef\xbb\xbf" + data),
            ("UTF-16", lambda data: data.decode("latin-1").encode("utf-16")),
            ("not UTF-8", lambda data: data + b"\xff\xfe\n"),
            ("twice", lambda data: data + data),
            ("nested 200,000 deep", lambda data: b"[" * 200_000 + b"]" * 200_000 + b"\n"),
            ("4,500 digits", lambda data: b"9" * 4_500 + b"\n"),
            ("only a number", lambda data: b"5\n"),
            ("only a list", lambda data: b"[]\n"),
            ("only a mapping", lambda data: b"{}\n"),
            ("a line of 5 MB", lambda data: b"x" * 5_000_000 + b"\n" + data),
            ("control characters", lambda data: b"\x1b[31m\x00\x07\n" + data),
            ("folder", FOLDER),
            ("pipe", PIPE),
            ("link to a device", DEVICE),
            ("link to itself", LOOP),
            ("dangling link", DANGLING),
        ]
    )


def _within(data: bytes, share: float, new: bytes) -> bytes:
    start = int(share * max(0, len(data) - len(new)))
    return data[:start] + new + data[start + len(new) :]


def _bit(data: bytes, share: float) -> bytes:
    if not data:
        return b"\1"
    at = int(share * len(data))
    return data[:at] + bytes([data[at] ^ 1 << int(8 * share * len(data) % 8)]) + data[at + 1 :]
