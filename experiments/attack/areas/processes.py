"""The process of a command: its streams, limits, environment and signals."""

import os
import pathlib
import random
import resource
import signal
from collections.abc import Callable

from experiments.attack.bases import SHORT
from experiments.attack.inputs import WORDS, Input

_PIPE = 128 + signal.SIGPIPE
_COMMANDS: list[tuple[str, list[str], list[str]]] = [
    ("train", ["--config=digits:smoke", "--workdir=@/new", *SHORT], []),
    ("train", ["--help"], []),
    ("train", ["--config=digits", "--print_config"], []),
    ("evaluate", ["--workdir=@/run"], ["run"]),
    ("compare", ["@/run", "@/run2", "--output=@/x.png"], ["run", "run2"]),
    ("plots", ["--workdir=@/run", "--out=@/x.png"], ["run"]),
    ("models.__main__", ["--json"], []),
    (
        "legw",
        [
            "--base-batch=20",
            "--base-lr=0.1",
            "--base-warmup-epochs=0.5",
            "--batches=20..80",
            "--num-examples=1000",
        ],
        [],
    ),
    ("plan.__main__", ["--config=digits", "--topology=v3-8", "--cache=@/plans"], ["plans"]),
    ("plan.__main__", ["--config=digits:batch=64", "--topology=v3-8", "--cache=@/new"], []),
    (
        "sweep",
        [
            "--config=digits:smoke",
            "--search=optimizer.learning_rate=0.01,0.02",
            "--workdir=@/new",
            *SHORT,
        ],
        [],
    ),
    ("reproduce.__main__", ["list", "--papers=@/papers"], ["papers"]),
    ("reproduce.__main__", ["show", "small/digits", "--papers=@/papers"], ["papers"]),
    ("reproduce.__main__", ["report", "--papers=@/papers", "--output=@/pages"], ["papers"]),
    (
        "reproduce.__main__",
        [
            "run",
            "small/digits",
            "--papers=@/papers",
            "--runs=@/runs",
            "--records=@/records",
            "--processes=2",
        ],
        ["papers"],
    ),
    (
        "data.prepare_text",
        ["--input=@/text/corpus/*.txt", "--output=@/out", "--train-vocab=120", "--processes=2"],
        ["text"],
    ),
    ("data.images.check", ["--dir=@/images"], ["images"]),
    ("launch.__main__", ["slurm", "--", "--config=digits", "--workdir=x"], []),
    ("launch.__main__", ["local", "--", "--config=digits:smoke", "--workdir=@/new", *SHORT], []),
    ("export", ["--workdir=@/bert", "--output=@/out"], ["bert"]),
]
_VARIABLES = (
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_CPU_DEVICES",
    "COLUMNS",
    "LINES",
    "TERM",
    "HOME",
    "XDG_CACHE_HOME",
    "TMPDIR",
    "PYTHONIOENCODING",
    "LC_ALL",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "MPLBACKEND",
    "MPLCONFIGDIR",
    "LAMB_TPU_SHARED",
)


def _closed_pipe(stream: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, stream)


def _full(stream: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), stream)


def _lose_folder() -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


SETTINGS: dict[str, Callable[[], None]] = {
    "standard output is a closed pipe": lambda: _closed_pipe(1),
    "standard error is a closed pipe": lambda: _closed_pipe(2),
    "standard output is full": lambda: _full(1),
    "standard output is closed": lambda: os.close(1),
    "standard error is closed": lambda: os.close(2),
    "standard input is closed": lambda: os.close(0),
    "24 open files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
    "files of 4 kB": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    "no disk space for files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    "current folder removed": _lose_folder,
}
# With these settings, the error message may be lost.
_SILENT = {
    "standard output is a closed pipe",
    "standard error is a closed pipe",
    "standard error is closed",
    "standard output is closed",
    "no disk space for files",
}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a command, and a change to its streams, limits, environment or signals."""
    module, arguments, bases = rng.choice(_COMMANDS)
    number = rng.random()
    setting, signals, environment, statuses = "", None, {}, frozenset[int]()
    if number < 0.4:
        change = setting = rng.choice(list(SETTINGS))
        if setting in _SILENT:
            statuses = frozenset({_PIPE, 1, 2, 120, -signal.SIGPIPE})
    elif number < 0.7:
        change, value = rng.choice([item for item in WORDS.items() if "\0" not in item[1]])
        name = rng.choice(_VARIABLES)
        environment, change = {name: value}, f"{name}: {change}"
    else:
        sent = rng.choice(_SIGNALS)
        signals = sent.value, round(rng.uniform(0.2, 6.0), 2)
        change = f"{sent.name}"
        # Until the command has installed its handlers, a signal ends the process without a message.
        statuses = frozenset({-sent.value, 128 + sent.value, os.EX_TEMPFAIL})
    return Input(
        "processes",
        change,
        module.partition(".")[0],
        f"lamb_tpu.{module}",
        arguments,
        bases,
        environment=environment,
        statuses=statuses,
        setting=setting,
        signals=signals,
    )
