"""Arguments of every command and subcommand."""

import pathlib
import random

from experiments.attack.bases import SHORT
from experiments.attack.inputs import WORDS, Input, flag

# Working commands: module, bases, words, and flags. The value '' marks a switch.
COMMANDS: list[tuple[str, tuple[str, ...], list[str], dict[str, str]]] = [
    (
        "lamb_tpu.train",
        (),
        list(SHORT),
        {
            "config": "digits:smoke",
            "workdir": "@/new",
            "num_processes": "1",
            "process_id": "0",
            "cpu_devices": "1",
            "coordinator_address": "localhost:1",
            "time-limit": "1h",
        },
    ),
    (
        "lamb_tpu.evaluate",
        ("run",),
        [],
        {"workdir": "@/run", "step": "best", "split": "test", "config": "digits:smoke"},
    ),
    ("lamb_tpu.predict", ("bert",), [], {"checkpoint": "@/bert", "text": "a [MASK] b", "top": "3"}),
    ("lamb_tpu.export", ("bert",), [], {"workdir": "@/bert", "output": "@/out", "step": "1"}),
    (
        "lamb_tpu.plan.__main__",
        ("plans",),
        [],
        {
            "config": "digits",
            "topology": "v3-8",
            "cache": "@/plans",
            "examples": "1000",
            "batches": "32,64",
            "find": "batch",
            "topologies": "v3-8,v3-32",
            "html": "@/x.html",
            "price-per-device-hour": "1.0",
            "measured": "v3-8=1min",
            "network-gbps": "10",
            "workdir": "@/run",
            "batches-of": "@/run",
        },
    ),
    (
        "lamb_tpu.sweep",
        (),
        [*SHORT, "--dry-run"],
        {
            "config": "digits:smoke",
            "search": "optimizer.learning_rate=log(0.01,0.1)",
            "workdir": "@/new",
            "trials": "2",
            "seed": "0",
            "seeds": "1",
            "metric": "accuracy",
            "better": "higher",
            "processes": "1",
            "time-limit": "1h",
        },
    ),
    (
        "lamb_tpu.compare",
        ("run", "run2"),
        ["@/run", "@/run2"],
        {"output": "@/x.png", "metric": "accuracy", "better": "higher", "against": "updates"},
    ),
    (
        "lamb_tpu.legw",
        (),
        [],
        {
            "base-batch": "20",
            "base-lr": "0.1",
            "base-warmup-epochs": "0.5",
            "batches": "20..80",
            "num-examples": "1000",
            "epochs": "10",
            "output": "@/x.svg",
        },
    ),
    (
        "lamb_tpu.critical_batch.__main__",
        ("run",),
        [],
        {
            "workdir": "@/run",
            "at": "2 steps",
            "factors": "1,2",
            "span": "1 steps",
            "scaling": "linear",
            "tolerance": "0.1",
            "seeds": "1",
            "split": "test",
            "metric": "loss",
        },
    ),
    ("lamb_tpu.plots", ("run",), [], {"workdir": "@/run", "out": "@/x.png"}),
    ("lamb_tpu.models.__main__", (), [], {"json": ""}),
    (
        "lamb_tpu.data.prepare_text",
        ("text",),
        [],
        {
            "input": "@/text/corpus/*.txt",
            "output": "@/out",
            "train-vocab": "120",
            "documents": "file",
            "sentences": "split",
            "shard-bytes": "100000",
            "processes": "1",
            "data-dir": "@/odd.folder",
            "vocab": "@/text/vocab.txt",
        },
    ),
    (
        "lamb_tpu.data.images.check",
        ("images",),
        [],
        {"dir": "@/images", "split": "train", "name": "image_folder"},
    ),
    ("lamb_tpu.reproduce.__main__", ("papers",), ["list"], {"papers": "@/papers"}),
    (
        "lamb_tpu.reproduce.__main__",
        ("papers",),
        ["show", "small/digits"],
        {"papers": "@/papers", "records": "@/papers"},
    ),
    (
        "lamb_tpu.reproduce.__main__",
        ("papers",),
        ["commands", "small/digits"],
        {"papers": "@/papers", "scale": "small", "cells": "lamb"},
    ),
    (
        "lamb_tpu.reproduce.__main__",
        ("papers",),
        ["run", "small/digits", "--dry-run"],
        {
            "papers": "@/papers",
            "scale": "small",
            "cells": "lamb",
            "seeds": "1",
            "runs": "@/runs",
            "data": "@/data",
            "processes": "1",
            "tune": "2",
            "time-limit": "1h",
            "budget": "1h",
            "carry": "@/carried.json",
            "records": "@/records",
        },
    ),
    (
        "lamb_tpu.reproduce.__main__",
        ("papers",),
        ["adopt", "@/papers/carried.json"],
        {"papers": "@/papers"},
    ),
    (
        "lamb_tpu.reproduce.__main__",
        ("papers",),
        ["report", "small/digits"],
        {"papers": "@/papers", "output": "@/pages", "html": "@/site", "records": "@/papers"},
    ),
]
# Flags that are given only if they are the ones to change, because they contradict other flags.
_ALONE = {
    "step",
    "config",
    "time-limit",
    "coordinator_address",
    "num_processes",
    "process_id",
    "batches",
    "find",
    "topologies",
    "html",
    "price-per-device-hour",
    "measured",
    "network-gbps",
    "batches-of",
    "vocab",
    "data-dir",
    "records",
    "data",
    "tune",
    "budget",
    "carry",
    "cells",
}
_NEEDED = {
    ("lamb_tpu.train", "config"),
    ("lamb_tpu.plan.__main__", "config"),
    ("lamb_tpu.sweep", "config"),
}


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a command and changes one of its arguments."""
    module, bases, words, flags = rng.choice(COMMANDS)
    name = rng.choice(list(flags))
    change, value = rng.choice(list(WORDS.items()))
    given = {
        key: text
        for key, text in flags.items()
        if key not in _ALONE or key == name or (module, key) in _NEEDED
    }
    if module.endswith("plan.__main__") and name != "workdir":
        given.pop("workdir", None)
    if name == "topologies":
        given.pop("topology", None)
    if name == "vocab":
        given.pop("train-vocab", None)
    arguments, location = list(words), f"--{name}"
    match rng.random():
        case share if share < 0.06:
            change = "flag missing"
            del given[name]
        case share if share < 0.1:
            change = "flag unknown"
            given[f"{name}x"] = given.pop(name)
        case share if share < 0.14:
            change, location = f"further word, {change}", "words"
            arguments.append(value)
        case share if share < 0.22 and words and not words[-1].startswith("-"):
            location = "words"
            arguments[-1] = value
        case _:
            given[name] = value
    arguments += [
        flag(key, text) if text or flags.get(key) else f"--{key}" for key, text in given.items()
    ]
    return Input(
        "commands",
        change,
        f"{module.removeprefix('lamb_tpu.')} {location}",
        module,
        arguments,
        bases,
    )
