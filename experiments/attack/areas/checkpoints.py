"""Checkpoints: a damaged file in a checkpoint, or an oddly named entry beside the checkpoints."""

import pathlib
import random

from experiments.attack.bases import SHORT
from experiments.attack.inputs import FOLDER, Input, damage

_COMMANDS = {
    "train": ["--config=digits:smoke", "--workdir=@/run", *SHORT, "--config.duration=6 steps"],
    "evaluate": ["--workdir=@/run"],
    "evaluate a step": ["--workdir=@/run", "--step=4"],
    "export": ["--workdir=@/run", "--output=@/out"],
    "critical_batch.__main__": [
        "--workdir=@/run",
        "--at=2 steps",
        "--factors=1,2",
        "--span=1 steps",
    ],
    "train from it": [
        "--config=digits:smoke",
        "--workdir=@/new",
        *SHORT,
        "--config.init_from=@/run",
    ],
}
_NAMES = (
    "run/checkpoints/abc",
    "run/checkpoints/-5",
    "run/checkpoints/\u0661",
    "run/checkpoints/99999999999999999999",
    "run/checkpoints/6.orbax-checkpoint-tmp",
    "run/checkpoints/5",
    "run/checkpoints/4 ",
    "run/checkpoints/1e3",
)


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a command, and damages a checkpoint's file or adds an oddly named entry."""
    command = rng.choice(list(_COMMANDS))
    if rng.random() < 0.15:
        name = rng.choice(_NAMES)
        content, change = rng.choice([(FOLDER, "further folder"), ("text", "further file")])
        files, location = {name: content}, name.removeprefix("run/")
    else:
        names = sorted(
            str(path.relative_to(prepared))
            for path in (prepared / "run/checkpoints").rglob("*")
            if path.is_file()
        )
        name = rng.choice(names)
        content, change, location = damage(rng, prepared, name, 0.6)
        files = {name: content}
        location = location.removeprefix("run/")
    return Input(
        "checkpoints",
        change,
        f"{command} {location}",
        f"lamb_tpu.{command.partition(' ')[0]}",
        _COMMANDS[command],
        ["run"],
        files,
    )
