"""Planned values of cells: times and rates predicted by lamb_tpu.plan for runs not made here.

These values are in planned.json beside the papers' folders; `python -m experiments.plan --tables` writes
the file of the shipped tables. Planning compiles for minutes, so commands that show tables read the file.
"""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading
from lamb_tpu.files.schema import convert
from lamb_tpu.reproduce.tables import Cell, Scale, Table

FILE = "planned.json"
SCALE = "paper"  # plans are for the paper's scale only
# Note shown below the planned values of a page.
NOTE = (
    "A planned value is the prediction of lamb_tpu.plan for the paper's run, without start-up, "
    "checkpoints and waiting for data. Its interval is for a program that was not used to fit the "
    "planner's constants; such intervals contained nine in ten published runs. The constants are "
    "fitted to the runs of experiments/plan/calibration.md; that page also predicts each run from "
    "the other programs alone."
)
_Word = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f|]*$")]
_Line = Annotated[str, Meta(min_length=1, max_length=1_000, pattern=r"^[^\x00-\x1f\x7f`]*$")]
_Value = Annotated[float, Meta(gt=0, le=1e15)]


class Planned(Struct, frozen=True, kw_only=True):
    """A planned value of a cell. Newer versions may add keys.

    Attributes:
      metric: key of the value, as in the cell's published values.
      value: the expected value, in the published unit.
      low, high: ends of its interval.
      command: the command that computes the plan.
      commit: commit of the code that computed the value.
      versions: versions of the compiler and of jax.
    """

    table: _Word
    cell: _Word
    metric: _Word
    unit: _Word
    value: _Value
    low: _Value
    high: _Value
    command: _Line
    commit: Annotated[str, Meta(pattern=r"^[0-9a-f]{12}\+?$")]
    versions: dict[_Word, _Word]

    @property
    def key(self) -> tuple[str, str, str]:
        """Table, cell and metric; unique in the file."""
        return self.table, self.cell, self.metric

    @property
    def text(self) -> str:
        """Value and interval, such as '56.9 (27.4 to 118)'."""
        value, low, high = map(_shown, (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"

    def note(self, cell: Cell) -> str:
        """Returns a note if the paper's value lies outside the interval, else ''."""
        published = cell.published.get(self.metric)
        if isinstance(published, (int, float)) and not self.low <= published <= self.high:
            return ", paper's outside"
        return ""


def read(papers: pathlib.Path) -> tuple[Planned, ...]:
    """Reads the planned values of a folder of papers; returns () if the file is missing."""
    path = papers / FILE
    try:
        content = reading.read_json(path)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "restore it") from None
    entries = tuple(convert(content, list[Planned], path))
    known = set[tuple[str, str, str]]()
    for number, entry in enumerate(entries, start=1):
        if not entry.low <= entry.value <= entry.high:
            raise UserError(
                f"{path}: entry {number}",
                problem=f"has low {entry.low:g}, value {entry.value:g} and high {entry.high:g}",
                remedy="give these three in ascending order",
            )
        if entry.key in known:
            raise UserError(
                f"{path}: entry {number}",
                problem=f"has the table, cell and metric of an earlier entry, {' '.join(entry.key)}",
                remedy="delete one of them",
            )
        known.add(entry.key)
    return entries


def of_table(table: Table) -> tuple[Planned, ...]:
    """Returns the planned values of a table's cells."""
    return tuple(each for each in read(table.path.parents[1]) if each.table == table.key)


def heads(table: Table, plans: Sequence[Planned]) -> list[str]:
    """Returns the headers of the columns of planned values, see `columns`."""
    metrics = {scale.metric.key for scale in table.scales.values()}
    texts = []
    for metric, unit in _metrics(plans).items():
        texts += [f"paper, {unit}"] * (metric not in metrics) + [f"planned, {unit}"]
    return texts


def columns(table: Table, scale: Scale, cell: Cell, plans: Sequence[Planned]) -> list[str]:
    """Returns a cell's planned values, each after the paper's value unless another column shows that value.

    Only the paper's scale has planned values.
    """
    metrics = {each.metric.key for each in table.scales.values()}
    cell_texts = {
        each.metric: each.text + each.note(cell) for each in plans if each.cell == cell.name
    }
    texts = []
    for metric in _metrics(plans):
        value = cell.published.get(metric, "")
        published = value if isinstance(value, str) else f"{value:.4g}"
        each = [published] * (metric not in metrics) + [cell_texts.get(metric, "")]
        texts += each if scale.name == SCALE else [""] * len(each)
    return texts


def instead(scale: Scale, cell: Cell, plans: Sequence[Planned]) -> str:
    """Returns a cell's planned value of the scale's metric, such as '56.9, 27.4 to 118', or ''."""
    return next(
        (
            f"{_shown(each.value)}, {_shown(each.low)} to {_shown(each.high)}"
            for each in plans
            if scale.name == SCALE and each.cell == cell.name and each.metric == scale.metric.key
        ),
        "",
    )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _metrics(plans: Iterable[Planned]) -> Mapping[str, str]:
    return {each.metric: each.unit for each in plans}


def dump(entries: Sequence[Planned]) -> str:
    """Returns the text of planned.json for some entries."""
    lines = [msgspec.json.encode(msgspec.to_builtins(each)).decode() for each in entries]
    return "[\n" + ",\n".join(lines) + "\n]\n"
