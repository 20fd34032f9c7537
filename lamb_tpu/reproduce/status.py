"""The status of a cell: measured at the paper's scale, measured at another scale, planned, or not run.

If a cell has runs at several scales, the first of these statuses that holds counts. A cell that cannot
be run, such as a cell with unpublished settings, is "not run"; pages add the reason.
"""

import collections
import enum
from collections.abc import Collection, Iterable
from typing import NamedTuple, Self

from lamb_tpu.reproduce import planned
from lamb_tpu.reproduce.planned import Planned
from lamb_tpu.reproduce.tables import Cell, Scale, Table


class Status(enum.Enum):
    """The four statuses of a cell, in the order of the pages."""

    PAPER = "measured at the paper's scale"
    OTHER = "measured at another scale"
    PLANNED = "planned"
    OPEN = "not run"


def of(scales: Collection[str], is_planned: bool = False) -> Status:
    """Returns the status of a cell that has measurements at some scales.

    `scales` are the scales with a run; diverged runs count, but stale runs and runs of a search do not.

    >>> of(["small", "paper"], True)
    <Status.PAPER: "measured at the paper's scale">
    >>> of([], True)
    <Status.PLANNED: 'planned'>
    """
    if "paper" in scales:
        return Status.PAPER
    if scales:
        return Status.OTHER
    return Status.PLANNED if is_planned else Status.OPEN


def label(table: Table, cell: Cell, standing: Status, detail: str) -> tuple[str, str]:
    """Returns a status as two texts for readers, without and with its detail.

    The detail is the number of seeds, or why the cell is not run, see `summary.Summary.status`. An example
    is the pair 'not run' and 'not run: settings not published'.
    """
    is_measured = standing in (Status.PAPER, Status.OTHER)
    # A study has no paper's scale, so the status of its measurements does not name a scale.
    is_study = "paper" not in table.scales and not cell.published
    text = "measured" if is_measured and is_study else standing.value
    if detail in ("measured", "not run"):
        return text, text
    if detail == "stale":
        detail = "stale runs only"
    return text, f"{text}{', ' if is_measured else ': '}{detail}"


def is_planned(scale: Scale, cell: Cell, plans: Iterable[Planned]) -> bool:
    """Returns whether the planner has predicted a cell's value at a scale.

    The value is that of the scale's metric or, if the paper publishes only other metrics of the cell, of
    any of them. So a planned time makes a published time "planned", but not a published accuracy.
    """
    if scale.name != planned.SCALE:
        return False
    metric = scale.metric.key
    wanted = {metric} if metric in cell.published or not cell.published else {*cell.published}
    return any(plan.cell == cell.name and plan.metric in wanted for plan in plans)


class Counts(NamedTuple):
    """Numbers of cells by status, in the order of `Status`."""

    paper: int = 0
    other: int = 0
    planned: int = 0
    open: int = 0

    @classmethod
    def of(cls, statuses: Iterable[Status]) -> Self:
        """Counts the statuses of some cells."""
        numbers = collections.Counter(statuses)
        return cls(*(numbers[status] for status in Status))

    @classmethod
    def sum(cls, counts: "Iterable[Counts]") -> Self:
        """Adds numbers of cells, status by status."""
        return cls(*map(sum, zip(*counts, strict=True)))

    @property
    def measured(self) -> int:
        """Number of cells with a run at any scale."""
        return self.paper + self.other

    @property
    def total(self) -> int:
        """Number of all cells."""
        return sum(self)
