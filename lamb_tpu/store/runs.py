"""Files that a run has left in its workdir, read for tables and plots."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.optim import durations
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir

_KEYS = ("optimizer.name", "model.name", "data.name", "batch_size", "duration")


class RunFiles(NamedTuple):
    """A run that has begun.

    Attributes:
      folder: its workdir.
      config: its flattened config.
      metrics: its metrics.jsonl.
    """

    folder: Workdir
    config: Mapping[str, Any]
    metrics: pathlib.Path

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Returns the records of a kind, see `metrics.MetricsWriter`."""
        return read_records(self.metrics, kind)

    def receipt(self) -> dict[str, Any]:
        """Returns versions and hardware of the last start; empty if they are missing."""
        starts = read_records(self.folder.run) if self.folder.run.exists() else []
        return starts[-1] if starts else {}

    def unfinished(self) -> str:
        """Returns why the run is not complete, such as 'is at 1.5 of 30 epochs'; '' if it is."""
        evaluations, trained = self.records("eval"), self.records("train")
        if not evaluations or not trained or evaluations[-1]["step"] < trained[-1]["step"]:
            return "has no evaluation at its end"
        if self.config.get("target.stop") and self.records("target"):
            return ""
        duration, last = durations.parse(self.config["duration"]), evaluations[-1]
        done = {
            "steps": last["step"],
            "epochs": last["epoch"],
            "examples": last["step"] * self.config["batch_size"],
        }[duration.unit]
        return "" if done >= duration.value else f"is at {done:g} of {self.config['duration']}"


def read(workdir: str | os.PathLike[str], key: str = "--workdir") -> RunFiles:
    """Reads the folder of a run that has begun.

    Args:
      workdir: the folder.
      key: the flag or argument that names it, for messages.

    Raises:
      UserError: it holds no run, one of several phases, or a damaged file.
    """
    folder = Workdir(workdir, key)
    if buckets.is_remote(folder.path):
        buckets.check(folder.path, key)
    path = folder.path / "metrics.jsonl"
    phases = sorted(file.parent.name for file in folder.path.glob("*/metrics.jsonl"))
    if phases and not path.exists():
        raise UserError(
            f"{key} {folder.path} holds the phases {', '.join(phases)}; give the folder of one of "
            "them"
        )
    config = folder.read_config()
    for name in _KEYS:
        if name not in config:
            raise UserError(f"{folder.config} is of no run, for it has no {name}")
    if not path.exists():
        raise UserError(f"there is no {path}; has the run of {key} begun?")
    return RunFiles(folder, config, path)
