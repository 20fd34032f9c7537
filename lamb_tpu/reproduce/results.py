"""Records of a table's runs: what was measured, and whether it still holds.

Beside a table mnist.toml lie mnist.jsonl, one line a run, and mnist.configs.json, the configs of
those runs by their hash. Records outlive the workdirs: a run with a record is not run again, unless
its config has changed or its line is deleted.
"""

import json
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lamb_tpu.errors import UserError
from lamb_tpu.files import locks, reading, writing
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import loading
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store import checkout
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir

Record = dict[str, Any]
# Fields of every record, with their types.
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "cell": (str,),
    "scale": (str,),
    "seed": (int,),
    "factor": (float, int, type(None)),
    "values": (dict, type(None)),
    "config": (str,),
    "updates": (int,),
    "seconds": (float, int),
    "device": (str,),
    "devices": (int,),
    "cores": (int,),
    "jax": (str,),
    "commit": (str, type(None)),
    "evaluations": (list,),
    "losses": (list,),
    "ratios": (dict,),
}
# Points kept of a curve: of a plot some inches wide, more would not be seen.
_POINTS, _RATIO_POINTS = 60, 20
_RATE = "examples_per_second"  # in the records of training, not of evaluation


class Results:
    """The records of a table.

    Args:
      table: the table.
      folder: records of one's own lie there, in a folder of the paper; None: those beside the
        table.

    Raises:
      UserError: a file of them is damaged; the message names file and line.
    """

    def __init__(self, table: Table, folder: pathlib.Path | None = None) -> None:
        if folder is None:
            self._path = table.records
        else:
            self._path = folder / table.paper.key / table.records.name
        # Those that are committed with the package.
        self._is_shipped = folder is None and self._path.is_relative_to(loading.folder())
        self._configs_path = self._path.with_suffix(".configs.json")
        self._changes: dict[Any, list[str]] = {}
        self._read()

    def _read(self) -> None:
        self._found: dict[Any, Record] = {}
        if self._path.exists():
            for number, record in enumerate(read_records(self._path), start=1):
                if reason := damage(record):
                    raise self._damaged(self._path, f"line {number} {reason}")
                self._found[_key(record)] = record
        try:
            self._configs = reading.read_json(self._configs_path)
        except FileNotFoundError:
            self._configs = {}
        except ValueError as error:
            raise self._damaged(self._configs_path, str(error)) from None
        for record in self:
            if record["config"] not in self._configs:
                raise self._damaged(
                    self._configs_path, f"the config {record['config']} of a record is missing"
                )

    def __iter__(self) -> Iterator[Record]:
        return (self._found[key] for key in sorted(self._found, key=str))

    def of(self, job: Job) -> Record | None:
        """Returns the record of a job, whether or not its config still holds."""
        return self._found.get(job.key)

    def config(self, record: Record) -> list[dict[str, Any]]:
        """Returns the flattened configs of a record's run, one for each stage."""
        return list(self._configs[record["config"]])

    def changes(self, job: Job) -> list[str]:
        """Returns what has changed in a job's config since its record; empty if nothing has."""
        record = self.of(job)
        if record is None:
            return []
        # Runs that differ by their seed alone have one config.
        key = (job.scale.name, job.cell.name, job.factor, job.chosen, record["config"])
        if key not in self._changes:
            flat = jobs_lib.flat_configs([stage.config() for stage in jobs_lib.stages(job)])
            same = record["config"] == jobs_lib.config_hash(flat)
            self._changes[key] = [] if same else jobs_lib.changes(self.config(record), flat)
        return self._changes[key]

    def holds(self, job: Job) -> bool:
        """Returns whether a job has a record of the config that it has now."""
        return self.of(job) is not None and not self.changes(job)

    def objection(self, commit: str | None) -> str:
        """Returns why no record of code at this commit is added, or '' if it may be added."""
        if not self._is_shipped or not checkout.is_changed(commit):
            return ""
        return (
            f"{self._path} takes records of committed code only, and the code has changed since "
            f"commit {str(commit)[:-1]}; commit the changes and then train, or keep the records "
            "elsewhere with `run --records=FOLDER`"
        )

    def add(self, record: Record, flat: Sequence[Mapping[str, Any]]) -> None:
        """Adds a record with its configs and writes both files, in place of an older record.

        Raises:
          UserError: see `objection`.
        """
        if reason := self.objection(record["commit"]):
            raise UserError(reason)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold(self._path.parent):
            self._read()  # another process may have added to it
            self._configs[record["config"]] = list(flat)
            self._found[_key(record)] = record
            used = {record["config"] for record in self}
            configs = json.dumps(
                {key: self._configs[key] for key in sorted(used)}, indent=1, sort_keys=True
            )
            # The configs first: a record whose config is missing would be damaged.
            writing.replace(self._configs_path, configs + "\n")
            writing.replace(self._path, "".join(json.dumps(record) + "\n" for record in self))

    def _damaged(self, path: pathlib.Path, reason: str) -> UserError:
        return UserError(f"{path} is damaged ({reason}); restore it, or delete the line")


def damage(record: Mapping[str, Any]) -> str:
    """Returns what a record lacks, such as 'has no seed of type int'; '' if nothing."""
    for field, kinds in _FIELDS.items():
        if field not in record or not isinstance(record[field], kinds):
            return f"has no {field} of type {kinds[0].__name__}"
    return ""


def of_run(job: Job, folder: pathlib.Path, diverged: str | None = None) -> Record:
    """Makes the record of a complete run from the files in its workdir.

    Args:
      job: the job.
      folder: the workdir of its last stage.
      diverged: why the run ended early; None: it is complete.
    """
    path = folder / "metrics.jsonl"
    evaluations, trained = read_records(path, "eval"), read_records(path, "train")
    receipts = read_records(folder / "run.jsonl")
    receipt = receipts[-1]
    commits = [each["commit"] for each in receipts]
    metric = job.scale.metric.key
    ends = dict(evaluations[-1]) if evaluations else {}
    rates = [record[_RATE] for record in trained if _RATE in record]
    if metric == _RATE and rates:
        ends[_RATE] = statistics.median(rates)  # a pause of the machine does not move it
    if diverged is None and metric not in ends:
        known = ", ".join(sorted(ends.keys() - {"step", "kind", "epoch"}))
        raise UserError(
            f"{job.table.path}: metric.key is {metric!r}, which the evaluations of cell "
            f"{job.cell.name} do not have; they have: {known}"
        )
    # A value that is not finite is text in the records.
    if diverged is None and isinstance(ends[metric], str):
        diverged = f"the last {metric} is {ends[metric]}"
    values = (
        {key: value for key, value in ends.items() if isinstance(value, float) and key != "epoch"}
        if evaluations and diverged is None
        else None
    )
    peak = max((record["learning_rate"] for record in trained), default=None)
    layers = _thinned(read_records(path, "layers"), _RATIO_POINTS)
    if job.factor is not None:  # nobody looks at the curves of a search
        evaluations, trained, layers = evaluations[-1:], trained[-1:], []
    names = [key for key in (layers[0] if layers else {}) if key.startswith("ratios/")]
    flat = Workdir(folder).read_config()
    updates = trained[-1]["step"] if trained else 0
    return {
        "cell": job.cell.name,
        "scale": job.scale.name,
        "seed": job.seed,
        "factor": job.factor,
        "chosen": job.chosen if job.table.tuning and job.factor is None else None,
        "values": values,
        "diverged": diverged,
        "updates": updates,
        # Records of training count examples only where the batch changes.
        "examples": trained[-1].get("examples", updates * flat["batch_size"]) if trained else 0,
        "sent_bytes": _sent_bytes(trained),
        "seconds": round(trained[-1]["seconds"], 1) if trained else 0.0,
        "batch": flat["batch_size"],
        "optimizer": flat["optimizer.name"],
        "learning_rate": peak,
        "config": "",
        **{key: receipt[key] for key in ("device", "devices", "cores", "jax", "python")},
        "processor": receipt.get("processor"),
        # A start from a changed tree marks the result of the starts after it too.
        "commit": next(filter(checkout.is_changed, commits), receipt["commit"]),
        "evaluations": [
            [round(record["epoch"], 4), _rounded(record.get(metric))] for record in evaluations
        ],
        "losses": [
            [record["step"], _rounded(record["loss"])]
            for record in _thinned(trained, _POINTS)
            if isinstance(record.get("loss"), float)
        ],
        "ratios": {
            name.removeprefix("ratios/"): [
                [record["step"], _rounded(record[name])] for record in layers
            ]
            for name in names
        },
    }


def machine(record: Mapping[str, Any]) -> str:
    """Describes the hardware, jax and the commit of a record, for a page."""
    commit = record["commit"]
    if checkout.is_changed(commit):
        commit = f"{commit[:-1]} with uncommitted changes"
    cores = f"{record['cores']} cores, " if "cores" in record else ""
    return (
        f"{record['devices']} x {record['device']}, {cores}"
        f"{record.get('processor') or 'processor not recorded'}, jax {record['jax']}, "
        f"commit {commit}"
    )


def _sent_bytes(trained: Sequence[Record]) -> int | None:
    """Returns the mean over updates of what a device sends, of those that say it."""
    sent = count = before = 0
    for record in trained:
        if "sent_bytes" in record:
            sent += (record["step"] - before) * record["sent_bytes"]
            count += record["step"] - before
        before = record["step"]
    return round(sent / count) if count else None


def _key(record: Record) -> tuple[Any, ...]:
    return record["scale"], record["cell"], record["seed"], record["factor"]


def _thinned(records: Sequence[Record], count: int) -> list[Record]:
    """Returns at most about `count` of the records, evenly spaced, with the last."""
    every = max(1, -(-len(records) // count))
    return list(records[::-1][::every][::-1])


def _rounded(value: float | str | None) -> float | None:
    """Returns five digits of a number; None for one that is missing or not finite."""
    return None if value is None or isinstance(value, str) else float(f"{value:.5g}")
