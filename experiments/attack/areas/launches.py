"""Options of the launcher, and flags of the command that it launches."""

import pathlib
import random

from experiments.attack.inputs import WORDS, Input, flag

_TRAIN = ["--config=digits:smoke", "--workdir=gs://bucket/run"]
# Launch type and working options. `--run` is never given, so nothing starts.
_TYPES: dict[str, dict[str, str]] = {
    "tpu-vm": {
        "topology": "v4-8",
        "name": "digits",
        "zone": "us-central2-b",
        "project": "p",
        "version": "v",
        "create-flag": "--reserved",
        "data": "gs://bucket/data",
        "from-step": "1",
    },
    "queued-resource": {
        "topology": "v5p-256",
        "name": "digits",
        "zone": "us-east5-a",
        "slices": "1",
        "image": "image",
    },
    "jobset": {
        "topology": "v6e-256",
        "name": "digits",
        "image": "image",
        "slices": "2",
        "max-restarts": "3",
        "output": "@/x.yaml",
    },
    "slurm": {
        "nodes": "4",
        "gpus-per-node": "8",
        "time": "24:00:00",
        "cpus-per-task": "4",
        "partition": "p",
        "signal-seconds": "180",
        "python": ".venv/bin/python",
        "name": "digits",
        "output": "@/x.sh",
    },
    "local": {
        "processes": "2",
        "devices-per-process": "1",
        "grace-seconds": "30",
        "module": "lamb_tpu.train",
    },
}
_WORKDIRS = (
    "gs://bucket/..",
    "gs://",
    "gs:///run",
    "gs://bucket",
    "gs://b\x1b[31m/x",
    "s3://b/x",
    "gs://bucket/\udcff",
    "gs://bucket/a b",
    "gs://bucket/$(touch mark)",
    "",
    "-",
    "~",
    "gs://bucket/'x'",
)


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Changes an option of the launcher, or a flag of the command to launch."""
    kind = rng.choice(list(_TYPES))
    options, train = dict(_TYPES[kind]), list(_TRAIN)
    change, value = rng.choice(list(WORDS.items()))
    if kind == "local":  # a bad value is rejected before a process starts
        train[1] = "--workdir=@/new"
    if rng.random() < 0.7:
        name = rng.choice(list(options))
        options[name], location = value, f"{kind} --{name}"
        if kind == "local" and name in ("grace-seconds", "module"):
            train[0] = "--config=not_there"
    elif rng.random() < 0.6 and kind != "local":
        value = rng.choice(_WORKDIRS)
        train[1], location, change = flag("workdir", value), f"{kind} --workdir", ascii(value)[:40]
    else:
        name = rng.choice(("config", "config.batch_size", "config.duration", "cpu_devices"))
        train.append(flag(name, value))
        location = f"{kind} -- --{name}"
        if kind == "local":
            train[0] = "--config=not_there"
    return Input(
        "launch",
        change,
        location,
        "lamb_tpu.launch.__main__",
        [kind, *(flag(key, text) for key, text in options.items()), "--", *train],
    )
