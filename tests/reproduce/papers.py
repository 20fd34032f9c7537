"""A papers folder with one small table; its runs train on the bundled digits data set."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from lamb_tpu.reproduce.engine import RunSetup, Take
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.loading import load_all
from lamb_tpu.reproduce.tables import Table

TABLE = """
title = "Digits by optimizer"
source = "Table 9"
known = "recalled"
metric = {key = "accuracy", label = "test accuracy, %", digits = 1, factor = 100.0}
cells = [
  {name = "lamb", argument = "optimizer=lamb", published = {accuracy = 93.0}},
  {name = "adamw", argument = "optimizer=adamw", published = {accuracy = 92.5}, known = "seen"},
  {name = "lars", published = {accuracy = "diverged"}, unknown = "settings not published"},
]

[scales.small]
config = "digits:batch=128"
examples = 1_437
overrides = {duration = "4 steps", "log.every" = "2 steps"}
seeds = 2
"""


TUNED = (
    TABLE
    + """
[tuning]
key = "optimizer.learning_rate"
factors = [0.5, 1, 2]
overrides = {"data.train_split" = "train[:80%]"}
seeds = 2
"""
)


def with_keys(text: str = TABLE, **keys: str) -> str:
    """Adds keys to cells of the table; `lamb='row = "a"'` adds the key `row` to the cell lamb."""
    for cell, more in keys.items():
        assert f'name = "{cell}"' in text
        text = text.replace(f'name = "{cell}"', f'name = "{cell}", {more}')
    return text


def write(folder: pathlib.Path, table: str = TABLE, name: str = "digits") -> Table:
    """Writes the paper 'small' with a table and returns the table."""
    paper = folder / "small"
    paper.mkdir(parents=True, exist_ok=True)
    (paper / "paper.toml").write_text('title = "A small paper"\narxiv = "0000.00000"\n')
    (paper / f"{name}.toml").write_text(table)
    return load_all(folder)[f"small/{name}"]


def setup(folder: pathlib.Path) -> RunSetup:
    """Returns a setup with a folder of runs, but without a folder of data sets."""
    return RunSetup(folder / "runs", None)


def taking(jobs: Iterable[Job]) -> Take:
    """Returns a `take` function that returns one job after another."""
    waiting = iter(jobs)
    return lambda: next((([job], None) for job in waiting), None)


def record(cell: str, seed: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    """Returns the record of a run."""
    return {
        "cell": cell,
        "scale": "small",
        "seed": seed,
        "factor": None,
        "chosen": None,
        "values": None if accuracy is None else {"accuracy": accuracy, "loss": 1.0},
        "diverged": None,
        "updates": 4,
        "seconds": 1.5,
        "batch": 128,
        "optimizer": cell,
        "learning_rate": 0.01,
        "config": "0" * 12,
        "device": "cpu",
        "devices": 1,
        "cores": 2,
        "jax": "0.10.2",
        "commit": "0123456789ab",
        "python": "3.11.7",
        "evaluations": [[0.36, accuracy]],
        "losses": [[2, 2.0], [4, 1.5]],
        "ratios": {},
    } | json.loads(json.dumps(more))
