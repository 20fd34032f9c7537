"""What studies share: a record for each run, kept in a file, and running what has none.

A cell is one run of a study: a NamedTuple with a `name`, which is that of its workdir, and fields
that its record has too. Records outlive the workdirs: a cell with a record is not run again, unless
its line in the file is deleted.
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
    """One run; a NamedTuple besides."""

    _fields: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its workdir."""


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
        """Of these cells, those that there are."""
        return [self._found[cell] for cell in sorted(set(cells)) if cell in self._found]

    def add(self, records: Iterable[Record]) -> None:
        """Takes records in and writes the file."""
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
      wanted: in the order in which they are run.
      records: kept after every run.
      runs: the folder of the workdirs.
      collect: makes the records of those of some cells whose run in the folder is complete.
      run: trains a cell in a workdir, or goes on with it; None: only collect.
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
    """Of each optimizer the rate whose run came out at the lowest cost.

    Args:
      records: of the runs that choose the rates.
      wanted: their cells, with the fields `optimizer` and `rate`.
      cost: of a record.

    Raises:
      UserError: one of them is not there.
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
    """All of a workdir's run so far; none where there is no run."""
    path = folder / "metrics.jsonl"
    return read_records(path, "eval") if path.exists() else []


def facts(folder: pathlib.Path) -> Record:
    """Of a workdir's run: seconds over all its starts, the last one's machine and versions."""
    trained = read_records(folder / "metrics.jsonl", "train")
    receipt = read_records(folder / "run.jsonl")[-1]
    return {
        "seconds": round(trained[-1]["seconds"], 1) if trained else 0.0,
        **{key: receipt[key] for key in ("device", "devices", "cores", "jax", "commit")},
    }


def machines(records: Iterable[Record]) -> str:
    """Those that `facts` has told, once each."""
    return "; ".join(sorted({f"{r['devices']} x {r['device']}, {r['cores']} cores"
                             for r in records}))


def versions(records: Iterable[Record]) -> str:
    """The same of versions."""
    return "; ".join(sorted({f"jax {r['jax']} at commit {r['commit']}" for r in records}))


def seed_columns(seeds: Sequence[Record], key: str) -> str:
    """Mean | lowest to highest | by seed | minutes a run | machine: of one row's runs.

    Args:
      seeds: their records, each with a `seed`.
      key: the record's number to show; None is of a run that diverged.
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
    """A number with four digits, or that there is none because the run diverged."""
    return "diverged" if value is None else f"{value:.4f}"


def integers(flag: str) -> list[int]:
    """The value of a flag that lists whole numbers.

    Raises:
      UserError: one of them is none, or the list is empty.
    """
    texts = flags.FLAGS[flag].value
    try:
        return [int(text) for text in texts or [""]]
    except ValueError:
        raise UserError(
            f"--{flag} is {','.join(texts)!r}; it must be whole numbers, such as 0,1,2"
        ) from None


def choices(flag: str, known: Iterable[str]) -> list[str]:
    """The value of a flag that lists names.

    Raises:
      UserError: one of them is not known, or the list is empty.
    """
    names, known = flags.FLAGS[flag].value, list(known)
    for name in names or [""]:
        if name not in known:
            raise UserError(f"--{flag} has {name!r}; known: {', '.join(known)}")
    return names
