"""Reading the files in a run's workdir, for tables and plots."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.files import buckets
from lamb_tpu.optim import durations
from lamb_tpu.store.metrics import read_receipts, read_records
from lamb_tpu.store.workdir import Workdir

_KEYS = ("optimizer.name", "model.name", "data.name", "batch_size", "duration")


class RunFiles(NamedTuple):
    """A run that has begun: its workdir, flattened config, and path of metrics.jsonl."""

    folder: Workdir
    config: Mapping[str, Any]
    metrics: pathlib.Path

    def records(self, kind: str, keys: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Returns the records of a kind, see `metrics.read_records`."""
        return read_records(self.metrics, kind, keys)

    def receipt(self) -> dict[str, Any]:
        """Returns the versions and hardware of the run's last start; empty if run.jsonl lacks them."""
        starts = read_receipts(self.folder.run) if self.folder.run.exists() else []
        return starts[-1] if starts else {}

    def unfinished(self) -> str:
        """Returns why the run is not complete, such as 'is at 1.5 of 30 epochs'; '' if it is complete."""
        evaluations, trained = self.records("eval", ["epoch"]), self.records("train")
        if not evaluations or not trained or evaluations[-1]["step"] < trained[-1]["step"]:
            return "has no evaluation at its end"
        if self.config.get("target.stop") and self.records("target"):
            return ""
        last, text = evaluations[-1], self.config["duration"]
        try:
            duration = durations.parse(text)
            if duration.unit == "percent":
                raise ValueError(f"{text!r} is not the length of a run")
        except ValueError as error:
            key = f"duration in {self.folder.config}"
            raise UserError(key, ABSENT, f": {error}", "restore the file") from None
        # Count examples: if the batch changes, '60 steps' means 60 updates of config.batch_size.
        examples = examples_at(last, trained, self.config["batch_size"])
        done = {
            "steps": examples / self.config["batch_size"],
            "epochs": last["epoch"],
            "examples": examples,
        }[duration.unit]
        # Compare floats: the float 0.3 (18,000 of 60,000 examples) is below the fraction 3/10.
        return "" if done >= float(duration.value) else f"is at {done:g} of {text}"


def examples_at(
    record: Mapping[str, Any], trained: Sequence[Mapping[str, Any]], batch_size: int
) -> int:
    """Returns the number of examples that a run had seen at one of its records.

    Training records count examples only if the batch changes; evaluation records never do.
    """
    if "examples" in record:
        return record["examples"]
    counted = next((each for each in trained if each.get("examples") and each.get("epoch")), None)
    if counted is None:
        return record["step"] * batch_size
    # Epochs are proportional to examples.
    return round(record["epoch"] * counted["examples"] / counted["epoch"])


def read(workdir: str | os.PathLike[str], key: str = "--workdir") -> RunFiles:
    """Reads the folder of a run; rejects a folder of several phases. `key` is the flag, for messages."""
    folder = Workdir(workdir, key)
    if buckets.is_remote(folder.path):
        buckets.check(folder.path, key)
    path = folder.path / "metrics.jsonl"
    phases = sorted(file.parent.name for file in folder.path.glob("*/metrics.jsonl"))
    if phases and not path.exists():
        problem = f"holds the phases {', '.join(phases)}"
        raise UserError(f"{key} {folder.path}", ABSENT, problem, "give the folder of one phase")
    config = folder.read_config()
    for name in _KEYS:
        if name not in config:
            problem = f"has no {name}, so it is not the config of a run"
            raise UserError(folder.config, ABSENT, problem, f"give another {key}")
    if not path.exists():
        problem = "does not exist, so the run has not begun"
        raise UserError(path, ABSENT, problem, f"start the run, or give another {key}")
    return RunFiles(folder, config, path)
