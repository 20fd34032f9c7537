"""TOML tables of papers."""

import pathlib
import random
import re

from experiments.attack.bases import PAPER, TABLE
from experiments.attack.inputs import TOML, Input, damages

_COMMANDS = (
    ["show", "small/digits"],
    ["list"],
    ["commands", "small/digits", "--scale=small"],
    ["run", "small/digits", "--runs=@/runs", "--dry-run"],
    ["run", "small/digits", "--runs=@/runs", "--dry-run", "--tune=2"],
    ["report", "small/digits", "--output=@/pages"],
    ["run", "small/digits", "--runs=@/runs"],
)
# Lines to insert below a heading; the heading '' stands for the top of the file.
_LINES = {
    "": "tuning = 5\nsweep = []\n",
    "[scales.small]": "cpu_devices = 1000000000000\n",
    "[tuning]": 'metric = {key = "step", label = "x"}\n',
}
_VALUE = re.compile(r"(?<=[\w\"] = )(\"[^\"]*\"|true|false|[-\d._]+|\[[^\]\n]*\]|\{[^{}\n]*\})")


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Changes a value of a table or paper, or damages the file."""
    name, text = rng.choice([("digits.toml", TABLE)] * 5 + [("paper.toml", PAPER)])
    number = rng.random()
    if number < 0.2:
        change, content = damages(rng)
        location = name
    elif number < 0.27:
        change, location, depth = "key 3,000 deep", name, 3_000
        content = f"{'.'.join(['x'] * depth)} = 1\n{text}"
    elif number < 0.34:
        heading, line = rng.choice(list(_LINES.items()))
        change, location = "further line", f"{name} {heading}"
        content = text.replace(heading, f"{heading}\n{line}", 1) if heading else line + text
    elif number < 0.42:
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        change, location = "line missing", f"{name} line {at + 1}"
        content = "\n".join(lines[:at] + lines[at + 1 :])
    else:
        match = rng.choice(list(_VALUE.finditer(text)))
        change, value = rng.choice(list(TOML.items()))
        key = re.findall(r"[\w.\"]+(?= = $)", text[: match.start()][-40:])
        location = f"{name} {key[-1] if key else ''}"
        content = text[: match.start()] + value + text[match.end() :]
    # Remove the records for half of the inputs: cells with records do not run, so changes have no effect.
    files = {f"papers/small/{name}": content}
    if rng.random() < 0.5:
        files |= {"papers/small/digits.jsonl": "", "papers/small/digits.configs.json": "{}"}
    return Input(
        "tables",
        change,
        location,
        "lamb_tpu.reproduce.__main__",
        [*rng.choice(_COMMANDS), "--papers=@/papers"],
        ["papers"],
        files,
    )
