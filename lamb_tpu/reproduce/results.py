"""The current and stale records of a table's runs.

Beside a table mnist.toml, mnist.jsonl has one line per run, and mnist.configs.json has the configs of
the runs by hash. Records remain if workdirs are deleted: a run that has a record is repeated only if its
config changes.
"""

import contextlib
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lamb_tpu.errors import UserError, listed
from lamb_tpu.files import buckets, locks, writing
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import loading, records
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.records import Record
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store import checkout
from lamb_tpu.store.metrics import read_receipts, read_records
from lamb_tpu.store.schema import LARGEST
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.terminal import fit

# Maximum number of points in a stored curve. A plot that is a few inches wide cannot show more.
_POINTS, _RATIO_POINTS = 60, 20
# Fields of a receipt that are copied into the record.
_VERSIONS = ("device", "devices", "cores", "jax", "python")
_RATE = "examples_per_second"  # a field of training records, not of evaluations


class Results:
    """The records of a table, without damaged records.

    Args:
      table: the table.
      folder: folder of the user's records, with a subfolder per paper; None uses the records beside
        the table.

    Attributes:
      damage: a sentence for each damaged entry, with file, line and key. Commands that only read
        print these as warnings; commands that write call `check` first.
    """

    def __init__(self, table: Table, folder: pathlib.Path | None = None) -> None:
        self._table = table
        beside = table.records
        self._path = beside if folder is None else folder / table.paper.key / beside.name
        # Whether these records are committed with the package.
        self._is_shipped = folder is None and self._path.is_relative_to(loading.folder())
        self._configs_path = self._path.with_suffix(".configs.json")
        self._changes: dict[Any, list[str]] = {}
        self._read()

    def _read(self) -> None:
        self._records: dict[Any, Record] = {}
        read = records.read(self._path, self._configs_path)
        self._configs, self.damage = read.configs, read.damage
        for number, record in read.records:
            scale = self._table.scales.get(record["scale"])
            metric = scale and scale.metric.key
            if metric and record["values"] is not None and metric not in record["values"]:
                self.damage.append(
                    f"line {number} of {self._path}: values has no {metric}, the metric of the "
                    f"scale {record['scale']}"
                )
            else:
                self._records[records.key_of(record)] = record

    def check(self) -> None:
        """Rejects damaged files, because a command that writes would delete the damaged entries."""
        if self.damage:
            more = f" (and {len(self.damage) - 1} more)" if len(self.damage) > 1 else ""
            raise UserError(
                self._path,
                problem=f"is damaged: {self.damage[0]}{more}",
                remedy=f"restore {self._path.name} and {self._configs_path.name}, or delete the "
                "damaged parts",
            )

    def warn(self) -> None:
        """Prints a warning for each damaged entry; for commands that only read."""
        for text in self.damage:
            print(fit(f"warning: {text}; this entry is omitted"), file=sys.stderr)

    def check_writable(self, commit: str | None) -> None:
        """Checks, before any run, that records of code at this commit can be added."""
        if error := self.objection(commit):
            raise error
        for path in (self._path, self._configs_path):
            writing.check_target(path, "--records", parents=True)

    def __iter__(self) -> Iterator[Record]:
        return (self._records[key] for key in sorted(self._records, key=str))

    def of(self, job: Job) -> Record | None:
        """Returns the record of a job, even if it is stale."""
        return self._records.get(job.key)

    def config(self, record: Record) -> list[dict[str, Any]]:
        """Returns the flattened configs of a record's run, one per stage."""
        return list(self._configs[record["config"]])

    def changes(self, job: Job) -> list[str]:
        """Returns the changes in a job's config since its record; empty if there are none."""
        record = self.of(job)
        if record is None:
            return []
        # Runs that differ only by seed have the same config.
        key = (job.scale.name, job.cell.name, job.factor, job.chosen, record["config"])
        if key not in self._changes:
            flat = jobs_lib.flat_configs([stage.config() for stage in jobs_lib.stages(job)])
            same = record["config"] == jobs_lib.config_hash(flat)
            self._changes[key] = [] if same else jobs_lib.changes(self.config(record), flat)
        return self._changes[key]

    def holds(self, job: Job) -> bool:
        """Returns whether a job has a record with its current config."""
        return self.of(job) is not None and not self.changes(job)

    def objection(self, commit: str | None) -> UserError | None:
        """Returns an error if records of code at this commit cannot be added, else None."""
        if self._is_shipped and loading.is_installed():
            return UserError(
                self._path,
                problem="belongs to the installed package",
                remedy="keep the records elsewhere with `run --records=FOLDER`",
            )
        if not self._is_shipped or not checkout.is_changed(commit):
            return None
        return UserError(
            self._path,
            problem="accepts only records of committed code, but the code has changed since "
            f"commit {str(commit)[:-1]}",
            remedy="commit the changes and then train, or keep the records elsewhere with "
            "`run --records=FOLDER`",
        )

    def add(self, record: Record, flat: Sequence[Mapping[str, Any]]) -> None:
        """Adds a record with its configs, replacing an older record of the run, and writes both files."""
        line = records.dump(record)
        records.check_configs(flat, record["config"], line[:60])
        if error := self.objection(record["commit"]):
            raise error
        with self._locked():
            self._read()  # another process may have added records
            self.check()
            self._configs[record["config"]] = [dict(stage) for stage in flat]
            self._records[records.key_of(record)] = record
            used = {record["config"] for record in self}
            configs = json.dumps(
                {key: self._configs[key] for key in sorted(used)}, indent=1, sort_keys=True
            )
            # Write the configs first: a record without its config counts as damaged.
            writing.replace(self._configs_path, configs + "\n")
            writing.replace(self._path, "".join(map(records.dump, self)))

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """Creates the folder, and locks it against other writing processes."""
        if buckets.is_remote(self._path):  # only one command or array job writes there
            return contextlib.nullcontext()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return locks.hold(self._path.parent)


def of_run(job: Job, folder: pathlib.Path, diverged: str | None = None) -> Record:
    """Creates the record of a run from the files in the workdir of its last stage.

    `diverged` says why the run ended early; None if the run is complete.
    """
    path = folder / "metrics.jsonl"
    evaluations = read_records(path, "eval", ["epoch"])
    trained = read_records(path, "train", ["seconds"])
    receipts = _receipts(folder / "run.jsonl")
    receipt = receipts[-1]
    commits = [each["commit"] for each in receipts]
    values, diverged = _values(job, evaluations, trained, diverged)
    peaks = [
        record["learning_rate"] for record in trained if _is_number(record.get("learning_rate"))
    ]
    layers = _thinned(read_records(path, "layers"), _RATIO_POINTS)
    if job.factor is not None:  # curves of a search are never shown
        evaluations, trained, layers = evaluations[-1:], trained[-1:], []
    flat = Workdir(folder).read_config()
    last = trained[-1] if trained else {"step": 0, "examples": 0, "seconds": 0.0}
    together = receipt.get("together", 1)
    return {
        "cell": job.cell.name,
        "scale": job.scale.name,
        "seed": job.seed,
        "factor": job.factor,
        "chosen": job.chosen if job.table.tuning and job.factor is None else None,
        "values": values,
        "diverged": diverged and " ".join(diverged.split())[:1000],
        "updates": last["step"],
        # Training records have the number of examples only if the batch size changes.
        "examples": last.get("examples", last["step"] * flat["batch_size"]),
        "sent_bytes": _sent_bytes(trained),
        "seconds": round(last["seconds"] / together, 1),
        **({"together": together} if together > 1 else {}),
        "batch": flat["batch_size"],
        "optimizer": flat["optimizer.name"],
        "learning_rate": max(peaks, default=None),
        "config": "",
        **{key: receipt[key] for key in _VERSIONS},
        "processor": receipt.get("processor"),
        # If the code had uncommitted changes at any start of the run, use the commit of that start.
        "commit": next(filter(checkout.is_changed, commits), receipt["commit"]),
        **_curves(job.scale.metric.key, evaluations, trained, layers),
    }


def _values(
    job: Job, evaluations: Sequence[Record], trained: Sequence[Record], diverged: str | None
) -> tuple[dict[str, float] | None, str | None]:
    """Returns the final metrics (None if the run diverged), and why it diverged (None if it did not)."""
    metric = job.scale.metric.key
    ends = dict(evaluations[-1]) if evaluations else {}
    rates = [record[_RATE] for record in trained if _is_number(record.get(_RATE))]
    if metric == _RATE and rates:
        ends[_RATE] = statistics.median(rates)  # robust to a pause of the machine
    if diverged is None and metric not in ends:
        known = sorted(ends.keys() - {"step", "kind", "epoch"})
        raise UserError(
            f"{job.table.path}: metric.key",
            metric,
            f"is not in the evaluations of cell {job.cell.name}",
            f"use {listed(known)}",
        )
    # The records store a non-finite value as text.
    if diverged is None and not _is_number(ends[metric]):
        diverged = f"the last {metric} is {ends[metric]}"
    if not evaluations or diverged is not None:
        return None, diverged
    names = [key for key in ends if key not in ("epoch", "step") and _is_number(ends[key])]
    return {key: float(ends[key]) for key in names}, None


def _curves(
    metric: str, evaluations: Sequence[Record], trained: Sequence[Record], layers: Sequence[Record]
) -> dict[str, Any]:
    """Returns a record's curves: metric by epoch, losses and trust ratios by update."""
    names = [key for key in (layers[0] if layers else {}) if key.startswith("ratios/")]
    return {
        "evaluations": [
            [round(record["epoch"], 4), _rounded(record.get(metric))] for record in evaluations
        ],
        "losses": [
            [record["step"], _rounded(record["loss"])]
            for record in _thinned(trained, _POINTS)
            if _is_number(record.get("loss"))
        ],
        "ratios": {
            name.removeprefix("ratios/"): [
                [record["step"], _rounded(record.get(name))] for record in layers
            ]
            for name in names
        },
    }


def _receipts(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the receipts of a run, one per process start, after checking the fields that records need."""
    receipts = read_receipts(path)
    if not receipts:
        raise UserError(
            path, ..., "is empty, so the machine of the run is unknown", "restore the file"
        )
    for number, receipt in enumerate(receipts, start=1):
        for key in (*_VERSIONS, "commit"):
            if key not in receipt:
                raise UserError(
                    f"line {number} of {path}", problem=f"has no {key}", remedy="restore the file"
                )
    return receipts


def machine(record: Mapping[str, Any]) -> str:
    """Describes hardware, jax version and commit of a record, for pages."""
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
    """Returns the mean number of bytes sent per update, over the updates that report a number."""
    sent = count = previous = 0
    for record in trained:
        if "sent_bytes" in record:
            sent += (record["step"] - previous) * record["sent_bytes"]
            count += record["step"] - previous
        previous = record["step"]
    return round(sent / count) if count else None


def _thinned(records: Sequence[Record], count: int) -> list[Record]:
    """Returns at most `count` evenly spaced records, including the last record."""
    every = max(1, -(-len(records) // count))
    return list(records[::-1][::every][::-1])


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number that a record can hold."""
    is_numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_numeric and abs(value) <= LARGEST


def _rounded(value: Any) -> float | None:
    return float(f"{value:.5g}") if _is_number(value) else None
