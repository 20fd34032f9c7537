"""Records of a study's runs, kept in a file, and a function that runs the missing ones.

A cell is one run of a study: a NamedTuple with a `name`, which names its workdir, and fields that
its record has too. Records outlive the workdirs: a cell with a record is not run again unless its
line in the file is deleted.
"""

import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from absl import flags

from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records

Record = dict[str, Any]


class Cell(Protocol):
    """One run of a study; implementations are NamedTuples."""

    _fields: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the run's workdir."""


class Records:
    """The records of a study, in a file of JSON lines, sorted by their cells.

    Args:
      path: the file; made with the first record.
      fields: of the study's cells. Of two records of one cell the newer one stays.
    """

    def __init__(self, path: pathlib.Path, fields: Sequence[str]) -> None:
        self._path, self._fields = path, fields
        self._found: dict[tuple[Any, ...], Record] = {}
        self._take(read_records(path) if path.exists() else [])

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._found

    def __iter__(self) -> Iterator[Record]:
        return (self._found[key] for key in sorted(self._found))

    def of(self, cells: Iterable[Cell]) -> list[Record]:
        """Returns the records of these cells, if there are any."""
        return [self._found[cell] for cell in sorted(set(cells)) if cell in self._found]

    def add(self, records: Iterable[Record]) -> None:
        """Adds records and writes the file."""
        if self._take(records):
            # By rename, so that a study killed here leaves the old file or the new one.
            replacement = self._path.with_suffix(".jsonl.new")
            replacement.write_text("".join(json.dumps(record) + "\n" for record in self))
            replacement.replace(self._path)

    def _take(self, records: Iterable[Record]) -> bool:
        found = {tuple(record[field] for field in self._fields): record for record in records}
        self._found |= found
        return bool(found)


def run_missing(
    wanted: Sequence[Cell],
    records: Records,
    runs: pathlib.Path,
    collect: Callable[[pathlib.Path, Sequence[Cell]], Iterable[Record]],
    run: Callable[[Cell, pathlib.Path], Any] | None,
) -> None:
    """Collects the complete runs of `wanted` below `runs`, and runs those that have no record.

    Args:
      wanted: cells in the order in which they are run.
      records: the study's records, written after every run.
      runs: the folder of the workdirs.
      collect: returns the records of those cells whose run in the folder is complete.
      run: trains a cell in a workdir, or resumes it; None: only collect.
    """
    records.add(collect(runs, wanted))
    for number, cell in enumerate(wanted, start=1):
        if run is not None and cell not in records:
            print(f"run {number} of {len(wanted)}: {cell.name}", flush=True)
            run(cell, runs / cell.name)
            records.add(collect(runs, [cell]))


def best_rates(
    records: Iterable[Record], wanted: Sequence[Cell], cost: Callable[[Record], float]
) -> dict[str, float]:
    """Returns for each optimizer the rate of the run with the lowest cost.

    Args:
      records: records of the runs that choose the rates.
      wanted: cells of these runs, with the fields `optimizer` and `rate`.
      cost: function from a record to its cost.

    Raises:
      UserError: a record is missing.
    """
    found = {tuple(record[field] for field in wanted[0]._fields): record for record in records}
    missing = [cell.name for cell in wanted if cell not in found]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(wanted)} runs that choose the rates are not there, "
            f"{missing[0]} among them; run them without --train=false"
        )
    return {
        optimizer: min(
            (cell for cell in wanted if cell.optimizer == optimizer),
            key=lambda cell: cost(found[cell]),
        ).rate
        for optimizer in dict.fromkeys(cell.optimizer for cell in wanted)
    }


def evaluations(folder: pathlib.Path) -> list[Record]:
    """Returns all evaluations of a workdir's run so far; none if there is no run."""
    path = folder / "metrics.jsonl"
    return read_records(path, "eval") if path.exists() else []


def facts(folder: pathlib.Path) -> Record:
    """Returns a run's seconds over all its starts, and machine and versions of the last start."""
    trained = read_records(folder / "metrics.jsonl", "train")
    receipt = read_records(folder / "run.jsonl")[-1]
    return {
        "seconds": round(trained[-1]["seconds"], 1) if trained else 0.0,
        **{key: receipt[key] for key in ("device", "devices", "cores", "jax", "commit")},
    }


def machines(records: Iterable[Record]) -> str:
    """Lists the machines of some records, each once."""
    return "; ".join(sorted({f"{r['devices']} x {r['device']}, {r['cores']} cores"
                             for r in records}))


def versions(records: Iterable[Record]) -> str:
    """Lists the versions of some records, each once."""
    return "; ".join(sorted({f"jax {r['jax']} at commit {r['commit']}" for r in records}))


def seed_columns(seeds: Sequence[Record], key: str) -> str:
    """Returns a row's cells: mean | lowest to highest | by seed | minutes a run | machine.

    Args:
      seeds: records of the row's runs, each with a `seed`.
      key: key of the number to show, which is None for a run that diverged.
    """
    if not seeds:
        return "not run | - | - | - | -"
    values = [record[key] for record in seeds]
    by_seed = ", ".join(f"{record['seed']}: {shown(record[key])}" for record in seeds)
    mean, spread = f"{values.count(None)} of {len(values)} diverged", "-"
    if None not in values:
        mean = f"{statistics.mean(values):.4f}"
        spread = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else "-"
    minutes = statistics.mean(record["seconds"] for record in seeds) / 60
    return f"{mean} | {spread} | {by_seed} | {minutes:.1f} | {machines(seeds)}"


def shown(value: float | None) -> str:
    """Formats a number with four digits; None means that the run diverged."""
    return "diverged" if value is None else f"{value:.4f}"


def integers(flag: str) -> list[int]:
    """Returns the value of a flag that lists whole numbers.

    Raises:
      UserError: an item is not a whole number, or the list is empty.
    """
    texts = flags.FLAGS[flag].value
    try:
        return [int(text) for text in texts or [""]]
    except ValueError:
        raise UserError(
            f"--{flag} is {','.join(texts)!r}; it must be whole numbers, such as 0,1,2"
        ) from None


def choices(flag: str, known: Iterable[str]) -> list[str]:
    """Returns the value of a flag that lists names.

    Raises:
      UserError: a name is unknown, or the list is empty.
    """
    names, known = flags.FLAGS[flag].value, list(known)
    for name in names or [""]:
        if name not in known:
            raise UserError(f"--{flag} has {name!r}; known: {', '.join(known)}")
    return names
