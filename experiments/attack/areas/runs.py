"""Files of a run: config.json, metrics.jsonl, run.jsonl and parameters.txt."""

import pathlib
import random

from experiments.attack.bases import SHORT
from experiments.attack.inputs import SPECIAL, Input, damage

_COMMANDS = {
    "train": ["--config=digits:smoke", "--workdir=@/run", *SHORT, "--config.duration=6 steps"],
    "evaluate": ["--workdir=@/run"],
    "compare": ["@/run", "@/run2", "--output=@/x.png"],
    "plots": ["--workdir=@/run", "--out=@/x.png"],
    "export": ["--workdir=@/run", "--output=@/out"],
    "critical_batch.__main__": [
        "--workdir=@/run",
        "--at=2 steps",
        "--factors=1,2",
        "--span=1 steps",
    ],
    "reproduce.__main__": ["adopt", "@/run", "--papers=@/papers"],
    "plan.__main__": [
        "--config=digits",
        "--topology=v3-8",
        "--cache=@/plans",
        "--batches=32",
        "--workdir=@/run",
    ],
}
# The commands that read each file.
_READ = {
    "run/config.json": (
        "train",
        "evaluate",
        "compare",
        "plots",
        "export",
        "reproduce.__main__",
        "critical_batch.__main__",
    ),
    "run/metrics.jsonl": ("train", "compare", "plots", "reproduce.__main__", "plan.__main__"),
    "run/run.jsonl": ("train", "compare", "reproduce.__main__"),
    "run/parameters.txt": ("train", "plots"),
}


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a file of a run and a command that reads it, and damages the file."""
    name = rng.choices(list(_READ), [4, 5, 2, 1])[0]
    content, change, location = damage(rng, prepared, name)
    command = rng.choice(_READ[name])
    bases = [
        "run",
        *(["run2"] if command == "compare" else []),
        *(["papers"] if command.startswith("reproduce") else []),
        *(["plans"] if command.startswith("plan") else []),
    ]
    assert not isinstance(content, str) or content in SPECIAL or content
    return Input(
        "stored runs",
        change,
        f"{command.partition('.')[0]} {location}",
        f"lamb_tpu.{command}",
        _COMMANDS[command],
        bases,
        {name: content},
    )
