"""Content of the pages: every cell of every table, as text."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from lamb_tpu.reproduce import engine, tuning
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.report import plans as plans_lib
from lamb_tpu.reproduce.report.plans import Plan
from lamb_tpu.reproduce.results import Results, machine
from lamb_tpu.reproduce.summary import (
    Summary,
    further,
    grid,
    measured,
    shown,
    stale,
    stale_mean,
    summaries,
)
from lamb_tpu.reproduce.tables import COLUMNS, Cell, Paper, Scale, Table


class Config(NamedTuple):
    """A stage's resolved config: the recipe, and its keys with their values."""

    recipe: str
    values: tuple[tuple[str, str], ...]


class Row(NamedTuple):
    """A cell of a table at a scale.

    Attributes:
      cell: the cell.
      id: unique on the page.
      published, known, measured, distance, seeds, status: see `Summary`.
      further: texts of the table's further columns, see `Page.heads`.
      state: of the status: 'measured', 'begun', 'stale', 'open' or 'unknown'.
      by_seed: seed and value of each run.
      search: see `Summary`.
      old: the mean of records that no longer hold; '' if none, or if there are newer ones.
      stale: their values, and what has changed since.
      hours: of all runs that measure.
      machines: where the runs were made.
      run: the command that measures the cell.
      commands: the commands that train the cell with seed 0, one for each stage.
      configs: of each stage.
    """

    cell: Cell
    id: str
    published: str
    known: str
    measured: str
    further: tuple[str, ...]
    distance: str
    seeds: int
    status: str
    state: str
    by_seed: tuple[tuple[int, str], ...]
    search: str
    old: str
    stale: str
    hours: float
    machines: tuple[str, ...]
    run: str
    commands: tuple[str, ...]
    configs: tuple[Config, ...]

    @property
    def minutes(self) -> str:
        """Mean time of a run; '' without one."""
        return f"{60 * self.hours / self.seeds:.1f}" if self.seeds else ""


class Part(NamedTuple):
    """A table at one scale.

    Attributes:
      scale: the scale.
      name: of the scale and, if it is not the table as its file has it, of the form.
      about: how it differs from the paper's, as sentences; '' if nothing is said.
      rows: every cell.
      columns, lines: the same cells as a matrix, empty if they have no place in one.
      figures: pictures by kind.
    """

    scale: Scale
    name: str
    about: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    lines: Mapping[str, tuple[Row | None, ...]]
    figures: dict[str, Figure]

    @property
    def num_measured(self) -> int:
        """Number of cells with a run."""
        return sum(row.seeds > 0 for row in self.rows)

    @property
    def num_stale(self) -> int:
        """Number of cells with stale runs only."""
        return sum(row.state == "stale" for row in self.rows)

    @property
    def hours(self) -> float:
        """Time of all runs that measure."""
        return sum(row.hours for row in self.rows)

    @property
    def told(self) -> str:
        """Number of measured cells, their time, and the time of a run, as sentences."""
        told = f"{self.num_measured} of {len(self.rows)} cells have runs"
        told += f", in {spent(self.hours)}" if self.num_measured else ""
        told += f"; {self.num_stale} have stale ones" if self.num_stale else ""
        return told + (f". It takes {self.scale.cost}." if self.scale.cost else ".")

    @property
    def machines(self) -> list[str]:
        """Devices and versions of the runs."""
        return list(dict.fromkeys(machine for row in self.rows for machine in row.machines))


class Page(NamedTuple):
    """The page of a table, with the name of its files."""

    table: Table
    about: str
    slug: str
    parts: tuple[Part, ...]

    @property
    def hours(self) -> float:
        """Time of all runs that measure."""
        return sum(part.hours for part in self.parts)

    @property
    def heads(self) -> list[str]:
        """Heads of the table's further columns."""
        return [COLUMNS[key] for key in self.table.columns]

    @property
    def best(self) -> list[tuple[Part, Row]]:
        """The rows to show where each cell has few: those that have runs, or else the first."""
        found = []
        for cell in self.table.cells.values():
            rows = [(part, row) for part in self.parts for row in part.rows if row.cell == cell]
            found += [pair for pair in rows if pair[1].seeds or pair[1].stale] or rows[:1]
        return found


def of_table(table: Table, records: pathlib.Path | None) -> Page:
    """Returns a table's page.

    Args:
      table: the table.
      records: folder of records of one's own; None: those beside the tables.
    """
    pairs = list[tuple[Part, list[Plan]]]()
    for form in tuning.forms(table, records):
        results = Results(form, records)
        for scale in form.measured_scales():
            found = summaries(form, scale, results)
            pairs.append((_part(form, scale, found, results), plans_lib.plans(form, scale, found)))
    pairs.sort(key=lambda pair: (not pair[0].num_measured, not pair[0].num_stale))
    drawn = list[list[Plan]]()
    for part, plans in pairs:
        if plans and plans not in drawn:  # scales often have the same
            part.figures["plans"] = plans_lib.draw(plans)
            drawn.append(plans)
    parts = tuple(part for part, _ in pairs)
    return Page(table, _line(table.about), table.key.replace("/", "-"), parts)


def _part(table: Table, scale: Scale, found: Sequence[Summary], results: Results) -> Part:
    name = scale.name + (table.form and f"-{table.form}")
    rows = {
        summary.cell.name: _row(table, scale, summary, results)._replace(
            id=f"{name}-{summary.cell.name}"
        )
        for summary in found
    }
    columns, lines = grid([summary.cell for summary in found])
    about = " ".join(filter(None, [_sentence(tuning.describe(table)), _sentence(scale.about)]))
    return Part(
        scale,
        name,
        about,
        tuple(rows.values()),
        tuple(columns),
        {line: tuple(cell and rows[cell.name] for cell in cells) for line, cells in lines.items()},
        pictures.all_of(scale, found),
    )


def _row(table: Table, scale: Scale, summary: Summary, results: Results) -> Row:
    cell, metric, records = summary.cell, scale.metric, summary.records
    run = f"python -m lamb_tpu.reproduce run {table.key} --cells={cell.name} --scale={scale.name}"
    if table.form and table.tuning is not None:
        run += f" --tune={len(table.tuning.factors)}"
    row = Row(
        cell,
        "",
        summary.published,
        cell.known if summary.published else "",
        measured(summary, metric),
        tuple(further(summary, key) for key in table.columns),
        "" if summary.distance is None else f"{summary.distance:+.{metric.digits}f}",
        len(records),
        summary.status,
        _state(summary),
        tuple(
            (record["seed"], "diverged" if value is None else shown(value, metric))
            for record, value in zip(records, summary.values)
        ),
        summary.search,
        "" if records else stale_mean(summary, metric),
        stale(summary, metric),
        sum(record["seconds"] for record in records) / 3600,
        tuple(sorted(set(map(machine, records)))),
        run,
        (),
        (),
    )
    if cell.unknown:
        return row._replace(run="")
    # After a search the command is that of the value which the search found best.
    chosen = records[0].get("chosen") if records else None
    stages = jobs_lib.stages(Job(table, scale, cell, 0, None, 1.0 if chosen is None else chosen))
    folders = engine.stage_folders(
        pathlib.Path("runs", table.key, f"{cell.name}-{scale.name}"), stages
    )
    flat = (
        results.config(records[0])
        if records
        else (jobs_lib.flat_configs([stage.config() for stage in stages]))
    )
    return row._replace(
        commands=tuple(
            stage.command(str(folder)) + (f" --config.init_from={folders[at - 1]}" if at else "")
            for at, (stage, folder) in enumerate(zip(stages, folders))
        ),
        configs=tuple(
            Config(stage.recipe, tuple((key, repr(value)) for key, value in sorted(values.items())))
            for stage, values in zip(stages, flat)
        ),
    )


def _state(summary: Summary) -> str:
    if summary.cell.unknown:
        return "unknown"
    if summary.records:
        return "measured" if summary.status == "measured" else "begun"
    return "stale" if summary.stale[0] else "open"


def _line(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    text = _line(text)
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def papers(pages: Sequence[Page]) -> list[tuple[Paper, list[Page]]]:
    """Returns the pages of each paper: published papers first, then studies of this project.

    A paper's numbered tables come before what has no number in it.
    """
    groups: dict[str, list[Page]] = {}
    for page in sorted(pages, key=_order):
        groups.setdefault(page.table.paper.key, []).append(page)
    return [(group[0].table.paper, group) for group in groups.values()]


def _order(page: Page) -> tuple[bool, str, bool, str, str]:
    paper, source = page.table.paper, page.table.source
    number = source if source.startswith("Table") else ""
    return not paper.arxiv, paper.key, not number, number, page.table.key


def spent(hours: float) -> str:
    """Formats a time, such as '3.2 hours', '5.0 minutes' or '4 seconds'."""
    if hours >= 1:
        return f"{hours:.1f} hours"
    minutes = 60 * hours
    return f"{minutes:.1f} minutes" if minutes >= 1 else f"{60 * minutes:.0f} seconds"


def total(pages: Sequence[Page]) -> tuple[int, int, int, float]:
    """Returns the numbers of cells that can be run, of those with a run, of runs, and their hours.

    A cell counts once, at whatever scale it was run.
    """
    cells = {
        (page.table.key, row.cell.name): 0
        for page in pages
        for part in page.parts
        for row in part.rows
        if not row.cell.unknown
    }
    for page in pages:
        for part in page.parts:
            for row in part.rows:
                if row.seeds:
                    cells[page.table.key, row.cell.name] += row.seeds
    return (
        len(cells),
        sum(count > 0 for count in cells.values()),
        sum(cells.values()),
        sum(page.hours for page in pages),
    )
