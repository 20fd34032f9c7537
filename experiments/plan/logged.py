"""Runs of this package on TPUs as points of the calibration: logged.jsonl.

`of_workdir` reads a finished run. The run's time is the number of timed updates times the seconds per
update at the median recorded rate, which excludes evaluation, saving, and the first update after the
process starts. All runs of one network count as one program, and have one source.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plan.rows import FOLDER, LOGGED, Phase, Run, Source, load_sources
from lamb_tpu.cost.topology import slice_name, topology, tpu_version
from lamb_tpu.errors import UserError, listed
from lamb_tpu.files import reading, writing
from lamb_tpu.plan.changing import changes
from lamb_tpu.spec import Spec, flatten, of_flat
from lamb_tpu.store import runs
from lamb_tpu.store.metrics import read_records

PATH = FOLDER / "logged.jsonl"
LEAST = 50  # minimum number of timed updates in a run
_RATE = "examples_per_second"
# Keys that do not change the step, and may name folders of the user's machine.
_DROPPED = ("checkpoint.", "log.", "seed", "init_from", "init.", "data.prepared_dir", "guards.")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of logged.jsonl.

    Attributes:
      program: network and number of parameters.
      topology: name of the slice.
      config: the flattened config, without keys that do not change the step.
      examples: number of examples in the training set.
      updates: number of timed updates.
      seconds: time of the timed updates.
      device: JAX's name of the device.
      mesh: sizes of the mesh axes.
      jax: version of jax.
      commit: commit of the package; None if it is unknown.
    """

    program: str
    topology: str
    config: Mapping[str, Any]
    examples: int
    updates: int
    seconds: float
    device: str
    mesh: Mapping[str, int]
    jax: str
    commit: str | None

    @property
    def phase(self) -> Phase:
        """The program of the run."""
        label = f"{self.program}, batch {self.config['batch_size']}"
        return Phase("", self.config, self.updates, label, self.examples)


_TYPES: dict[str, Any] = {
    "program": str,
    "topology": str,
    "config": dict,
    "examples": int,
    "updates": int,
    "seconds": (int, float),
    "device": str,
    "mesh": dict,
    "jax": str,
    "commit": (str, type(None)),
}


def load_all() -> tuple[Source, ...]:
    """Returns the published sources, and a source for each program of logged.jsonl.

    Raises:
      UserError: a line of the file is damaged; the message names the line and the field.
    """
    rows = read(PATH)
    programs = dict.fromkeys(row.program for row in rows)
    return *load_sources(), *(
        _source(program, [row for row in rows if row.program == program]) for program in programs
    )


def _source(program: str, rows: Sequence[Row]) -> Source:
    name = LOGGED + program
    logged_runs = tuple(Run(name, row.topology, (row.phase,), seconds=row.seconds) for row in rows)
    versions = ", ".join(dict.fromkeys(f"jax {row.jax}" for row in rows))
    return Source(name, "logged.jsonl", "logged", f"the program here, {versions}", logged_runs)


def read(path: pathlib.Path) -> list[Row]:
    """Returns the rows of a file; [] if the file is missing.

    Raises:
      UserError: a line is damaged or duplicated; the message names the line and the field.
    """
    if not path.exists():
        return []
    rows = list[Row]()
    for number, record in enumerate(read_records(path), start=1):
        row = _parse(record, f"line {number} of {path}")
        if row in rows:
            first = rows.index(row) + 1
            problem = f"repeats line {first}"
            raise UserError(f"line {number} of {path}", problem=problem, remedy="delete one line")
        rows.append(row)
    return rows


def _parse(record: Mapping[str, Any], where: str) -> Row:
    if record.keys() != _TYPES.keys():
        odd = sorted(record.keys() ^ _TYPES.keys())
        problem, remedy = (
            f"has missing or unknown fields: {', '.join(odd)}",
            f"use the fields {listed(_TYPES, 'and')}",
        )
        raise UserError(where, problem=problem, remedy=remedy)
    for name, wanted in _TYPES.items():
        if not isinstance(record[name], wanted) or isinstance(record[name], bool):
            key, problem = f"{where}: {name}", "has the wrong type"
            raise UserError(key, record[name], problem, "restore the line")
    for name in ("examples", "updates", "seconds"):
        if not 0 < record[name] < math.inf:
            remedy = "give a positive, finite number"
            raise UserError(f"{where}: {name}", record[name], "is out of range", remedy)
    if "batch_size" not in record["config"]:
        remedy = "give the run's flattened config"
        raise UserError(f"{where}: config", problem="has no batch_size", remedy=remedy)
    if not record["program"].strip():
        raise UserError(f"{where}: program", problem="is empty", remedy="give the network's name")
    row = Row(**record)
    try:
        slice_, version = topology(row.topology), tpu_version(row.device)
        config = of_flat(row.config)
    except (UserError, AttributeError, TypeError, ValueError) as error:
        raise UserError(where, problem=f"cannot be planned: {error}") from None
    if version != slice_.version:
        raise UserError(
            f"{where}: device",
            row.device,
            f"is a {version}, and {row.topology} is a slice of {slice_.version}",
            "give the slice of the run",
        )
    if math.prod(row.mesh.values()) != slice_.num_devices:
        raise UserError(
            f"{where}: mesh",
            dict(row.mesh),
            f"does not fit {row.topology}, which has {slice_.num_devices:,} devices",
            "give the slice of the run",
        )
    _check_config(config, where)
    return row


def _check_config(config: Spec, where: str) -> None:
    """Checks that a config needs only one program, and has no custom components."""
    custom = [
        f"{key}={value}"
        for key, value in flatten(config).items()
        if key.endswith("name")
        and isinstance(value, str)
        and ":" in value
        and not value.startswith("tfds:")
    ]
    if custom:
        raise UserError(
            where,
            problem=f"has the custom component {custom[0]}, which the calibration cannot compile",
            remedy="give a run that uses only the package's components",
        )
    if changes(config):
        raise UserError(
            where,
            problem="changes its batch, so its rates belong to several programs",
            remedy="give a run with one batch size",
        )


def of_workdir(workdir: str | os.PathLike[str], slice_: str | None = None) -> Row:
    """Returns the row of a finished run on a TPU.

    Args:
      workdir: folder of the run.
      slice_: name of the run's slice; None selects the only named slice with the run's number of devices.

    Raises:
      UserError: the folder holds no finished run on a TPU with enough timed updates.
    """
    run = runs.read(workdir, "--add")
    where = f"--add {run.folder.path}"
    receipts = read_records(run.folder.run)
    if not receipts:
        problem = f"has an empty {run.folder.run.name}, so its hardware is unknown"
        raise UserError(where, problem=problem, remedy="restore the file")
    for key, wanted in (("device", str), ("devices", int), ("mesh", dict), ("jax", str)):
        if not isinstance(receipts[-1].get(key), wanted):
            problem = f"has no {key} of type {wanted.__name__}"
            raise UserError(run.folder.run, problem=problem, remedy="restore the file")
        if any(receipt.get(key) != receipts[-1][key] for receipt in receipts):
            values = " and ".join(dict.fromkeys(str(receipt.get(key)) for receipt in receipts))
            raise UserError(
                where,
                problem=f"was started with {key} {values}, so its rates belong to several programs",
                remedy=f"give a run with one value of {key}",
            )
    receipt = receipts[-1]
    if not receipt["device"].startswith("TPU"):
        raise UserError(
            f"{where}: device", receipt["device"], "is not a TPU", "give a run on a TPU"
        )
    if reason := run.unfinished():
        raise UserError(where, problem=f"holds a run that {reason}", remedy="let it finish")
    name = slice_name(receipt["device"], receipt["devices"]) if slice_ is None else slice_
    config = of_flat(run.config)
    _check_config(config, where)
    trained = run.records("train")
    timed = [record for record in trained if isinstance(record.get(_RATE), (int, float))]
    rates = [record[_RATE] for record in timed if 0 < record[_RATE] < math.inf]
    updates = sum(record.get("updates", 0) for record in timed)
    if updates < LEAST or not rates:
        raise UserError(
            where,
            problem=f"has too few timed updates: {updates} instead of at least {LEAST}",
            remedy="give a longer run",
        )
    last = trained[-1]
    settings = {key: each for key, each in flatten(config).items() if not key.startswith(_DROPPED)}
    record = {
        "program": _program(run),
        "topology": name,
        "config": settings,
        "examples": round(last["step"] * config.batch_size / last["epoch"]),
        "updates": updates,
        "seconds": round(updates * config.batch_size / statistics.median(rates), 3),
        "device": receipt["device"],
        "mesh": receipt["mesh"],
        "jax": receipt["jax"],
        "commit": receipt.get("commit"),
    }
    return _parse(record, where)


def _program(run: runs.RunFiles) -> str:
    try:
        table = reading.read_text(run.folder.parameters)
    except (FileNotFoundError, ValueError):
        table = ""
    match = re.search(r"^total: .*?(\d[\d,]*) values", table, re.MULTILINE)
    if match is None:
        problem = "has no line with the total number of parameters"
        raise UserError(run.folder.parameters, problem=problem, remedy="restore the file")
    return f"{run.config['model.name']} of {int(match[1].replace(',', '')):,} parameters"


def check_new(row: Row) -> None:
    """Checks that logged.jsonl does not already contain `row`.

    Raises:
      UserError: the file contains `row`, or is damaged.
    """
    rows = read(PATH)
    if row in rows:
        problem = f"already contains this run, in line {rows.index(row) + 1}"
        raise UserError(PATH, problem=problem, remedy="give another run")


def add(row: Row) -> None:
    """Appends a row to logged.jsonl.

    Raises:
      UserError: the file already contains `row`, is damaged, or cannot be written.
    """
    check_new(row)
    rows = [*read(PATH), row]
    text = "".join(json.dumps(dataclasses.asdict(each), sort_keys=True) + "\n" for each in rows)
    writing.replace(PATH, text)
