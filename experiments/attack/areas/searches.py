"""Searches of sweeps, and the tables that sweeps write."""

import pathlib
import random

from experiments.attack.bases import SHORT
from experiments.attack.inputs import WORDS, Input, damage, flag

_SEARCHES = (
    "optimizer.learning_rate=log(0,1)",
    "optimizer.learning_rate=log(1,0.1)",
    "optimizer.learning_rate=log(nan,1)",
    "optimizer.learning_rate=linear(0,inf)",
    "optimizer.learning_rate=log(0.1)",
    "optimizer.learning_rate=",
    "=1,2",
    "x=1,2",
    "optimizer.learning_rate=log(0.1,1e400)",
    "batch_size=0,32",
    "batch_size=a,b",
    "optimizer.learning_rate=log(log(1,2),3)",
    "optimizer.learning_rate=0.1,0.1",
    "optimizer.name=lamb,adamw,none",
    "seed=0,1",
    "duration=1 steps,2 steps",
    "model=1,2",
    "optimizer.learning_rate=log(-1,1)",
    "log.every=1,2",
    "optimizer.learning_rate=" + ",".join(map(str, range(5_000))),
)


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a search or one of its options, or damages a sweep's folder."""
    command = ["--config=digits:smoke", "--workdir=@/new", *SHORT, "--dry-run"]
    number = rng.random()
    if number < 0.35:
        search = rng.choice(_SEARCHES)
        return Input(
            "searches",
            "search",
            search[:40],
            "lamb_tpu.sweep",
            [*command, flag("search", search), *rng.choice(([], ["--trials=3"]))],
        )
    if number < 0.65:
        change, value = rng.choice(list(WORDS.items()))
        form = rng.choice(
            (
                "{}={}",
                "optimizer.learning_rate={1}",
                "optimizer.learning_rate=log({1},1)",
                "optimizer.learning_rate=linear(0,{1})",
                "{1}=1,2",
            )
        )
        return Input(
            "searches",
            change,
            form,
            "lamb_tpu.sweep",
            [*command, flag("search", form.format("seed", value)), "--trials=2"],
        )
    names = sorted(
        str(path.relative_to(prepared))
        for path in (prepared / "sweep").rglob("*")
        if path.is_file()
        and path.suffix in (".toml", ".json", ".jsonl")
        and "checkpoints" not in str(path)
    )
    name = rng.choice(names)
    content, change, location = damage(rng, prepared, name)
    return Input(
        "searches",
        change,
        location.rpartition("/")[2],
        "lamb_tpu.sweep",
        [
            "--config=digits:smoke",
            "--search=optimizer.learning_rate=0.01,0.02",
            "--workdir=@/sweep",
            *SHORT,
        ],
        ["sweep"],
        {name: content},
    )
