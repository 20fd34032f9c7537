"""The content of the pages: every cell of every table, as text."""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from lamb_tpu.reproduce import divergence, planned, tuning
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import status as status_lib
from lamb_tpu.reproduce.planned import Planned
from lamb_tpu.reproduce.report import figures as figures_lib
from lamb_tpu.reproduce.report import lines as lines_lib
from lamb_tpu.reproduce.report import plans as plans_lib
from lamb_tpu.reproduce.report.plans import RateCurve
from lamb_tpu.reproduce.results import Results, machine
from lamb_tpu.reproduce.status import Status
from lamb_tpu.reproduce.summary import (
    Summary,
    column_value,
    cost,
    criterion,
    difference,
    grid,
    measured,
    stale,
    stale_mean,
    summaries,
)
from lamb_tpu.reproduce.tables import COLUMNS, Cell, Paper, Scale, Table


class Config(NamedTuple):
    """A stage's resolved config: its recipe, and its keys with values."""

    recipe: str
    values: tuple[tuple[str, str], ...]


class CellRow(NamedTuple):
    """A cell of a table at a scale.

    Attributes:
      id: a name that is unique on the page.
      published, measured, distance, search, status: texts from the cell's `Summary`.
      known: see `tables.Cell`; '' if no value is published.
      seeds: number of runs with the current config.
      further: texts of the table's additional columns, see `Page.heads`.
      state: CSS class of the status: 'measured', 'other' (measured at another scale), 'begun',
        'planned', 'stale', 'open' or 'unknown'.
      by_seed: pairs of seed and value, one per run.
      old: mean of the stale records; '' if there are no stale records, or if there are current records.
      stale: values of the stale records, and the changes in the config since then.
      hours: total time of the measurements, in hours.
      run: the command that measures the cell.
      commands, configs: for each stage, the command that trains it with seed 0, and its config.
      standing: the cell's status at this scale.
      group: the status for readers; 'measured' in a study, which has no paper's scale.
      label: `group` with a reason or the number of seeds, as in 'not run: settings not published'.
      optimizer, batch: settings of the first stage, such as pre-training; '' if unknown.
      planned: planned value of the table's metric, such as '56.9, 27.4 to 118'; '' if there is no
        planned value, or if the cell is measured.
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
    standing: Status
    group: str
    label: str
    optimizer: str
    batch: str
    planned: str = ""

    @property
    def here(self) -> str:
        """The measured value, or else the mean of stale runs, or else the planned value."""
        return self.measured or self.old or (f"planned {self.planned}" if self.planned else "")

    @property
    def minutes(self) -> str:
        """Mean minutes per run; '' without runs."""
        return f"{60 * self.hours / self.seeds:.1f}" if self.seeds else ""


class Part(NamedTuple):
    """A table at one scale.

    Attributes:
      name: name of the scale, followed by the form of the table if it has one, as in 'small-tuned'.
      about: differences from the paper's setting, as sentences; '' if none are given.
      columns, lines: the cells as a matrix; empty if the table has no matrix.
      figures: figures by name.
      criterion: when a run counts as diverged, as a sentence; '' if no run diverged.
      cost: hardware and time of a run; '' if neither is known.
    """

    scale: Scale
    name: str
    about: str
    rows: tuple[CellRow, ...]
    columns: tuple[str, ...]
    lines: Mapping[str, tuple[CellRow | None, ...]]
    figures: dict[str, Figure]
    criterion: str = ""
    cost: str = ""

    @property
    def num_measured(self) -> int:
        """Number of cells with a run."""
        return sum(row.seeds > 0 for row in self.rows)

    @property
    def num_stale(self) -> int:
        """Number of cells with only stale runs."""
        return sum(row.state == "stale" for row in self.rows)

    @property
    def hours(self) -> float:
        """Total hours of the measurements."""
        return sum(row.hours for row in self.rows)

    @property
    def summary(self) -> str:
        """Number of measured cells, their total time, and the cost of a run, as sentences."""
        text = f"{self.num_measured} of {len(self.rows)} cells have runs"
        text += f", in {spent(self.hours)}" if self.num_measured else ""
        text += f"; {self.num_stale} have only stale runs" if self.num_stale else ""
        text += f". Cost: {self.cost}." if self.cost else "."
        return text + (self.criterion and f" {self.criterion}")

    @property
    def machines(self) -> list[str]:
        """Devices and versions of the runs."""
        return list(dict.fromkeys(machine for row in self.rows for machine in row.machines))


class Page(NamedTuple):
    """The page of a table.

    Attributes:
      about: notes for readers.
      slug: name of the page's files.
      parts: the table at each scale.
      num_damaged: number of damaged records, which the page omits.
      planned: planned values of the table's cells.
    """

    table: Table
    about: str
    slug: str
    parts: tuple[Part, ...]
    num_damaged: int = 0
    planned: tuple[Planned, ...] = ()

    @property
    def hours(self) -> float:
        """Total hours of the measurements."""
        return sum(part.hours for part in self.parts)

    @property
    def damage(self) -> str:
        """A sentence about damaged records; '' if there are none."""
        if not self.num_damaged:
            return ""
        records = "record is" if self.num_damaged == 1 else "records are"
        omitted = f"{self.num_damaged} damaged {records} omitted from this page"
        return f"{omitted}; `show {self.table.key}` lists them."

    @property
    def heads(self) -> list[str]:
        """Headers of the table's additional columns."""
        return [*(COLUMNS[key] for key in self.table.columns), *self.plan_heads]

    @property
    def plan_heads(self) -> list[str]:
        """Headers of the columns with planned values, which are the last columns."""
        return planned.heads(self.table, self.planned)

    @property
    def best(self) -> list[tuple[Part, CellRow]]:
        """The most informative rows of each cell: rows with runs, else rows with plans, else one row."""
        pairs = []
        for cell in self.table.cells.values():
            rows = [(part, row) for part in self.parts for row in part.rows if row.cell == cell]
            run = [pair for pair in rows if pair[1].seeds or pair[1].stale]
            plan = [pair for pair in rows if pair[1].standing is Status.PLANNED]
            pairs += run or plan or rows[:1]
        return pairs


def of_table(table: Table, records: pathlib.Path | None) -> Page:
    """Returns a table's page, from the records in `records`; None uses the records beside the tables."""
    pairs, drawn, num_damaged = list[tuple[Part, list[RateCurve]]](), list[list[RateCurve]](), 0
    plans_of = planned.of_table(table)
    for form in tuning.forms(table, records):
        results = Results(form, records)
        results.warn()
        num_damaged += len(results.damage)
        for scale in form.measured_scales():
            cells = summaries(form, scale, results)
            part = _part(form, scale, cells, results, plans_of)
            pairs.append((part, plans_lib.plans(form, scale, cells)))
    pairs.sort(key=lambda pair: (not pair[0].num_measured, not pair[0].num_stale))
    for part, plans in pairs:
        has_planned = plans_of and part.scale.name == "paper"
        has_values = part.num_measured or part.num_stale or has_planned
        if has_values and plans and plans not in drawn:  # scales often share their plans
            part.figures["plans"] = plans_lib.draw(plans)
            drawn.append(plans)
    parts = tuple(part for part, _ in pairs)
    return Page(
        table, _line(table.about), slug(table.key), parts, num_damaged=num_damaged, planned=plans_of
    )


def slug(key: str) -> str:
    """Returns the name of a table's files in the report.

    >>> slug("lamb/mnist")
    'lamb-mnist'
    """
    return key.replace("/", "-")


def _part(
    table: Table,
    scale: Scale,
    cell_summaries: Sequence[Summary],
    results: Results,
    plans: Sequence[Planned],
) -> Part:
    name = scale.name + (table.form and f"-{table.form}")
    rows = {
        summary.cell.name: _row(table, scale, summary, results, plans)._replace(
            id=f"{name}-{summary.cell.name}"
        )
        for summary in cell_summaries
    }
    columns, lines = grid([summary.cell for summary in cell_summaries])
    about = " ".join(filter(None, [_sentence(tuning.describe(table)), _sentence(scale.about)]))
    return Part(
        scale=scale,
        name=name,
        about=about,
        rows=tuple(rows.values()),
        columns=tuple(columns),
        lines={
            line: tuple(cell and rows[cell.name] for cell in cells) for line, cells in lines.items()
        },
        figures=figures_lib.all_of(scale, cell_summaries),
        criterion=criterion(cell_summaries, scale.metric),
        cost=cost(scale, cell_summaries),
    )


def _row(
    table: Table, scale: Scale, summary: Summary, results: Results, plans: Sequence[Planned]
) -> CellRow:
    cell, metric, records = summary.cell, scale.metric, summary.records
    standing = status_lib.of(
        [scale.name] if records else [], status_lib.is_planned(scale, cell, plans)
    )
    group, label = status_lib.label(table, cell, standing, summary.status)
    stages = [] if cell.unknown else jobs_lib.stages(summary.job(table, scale), "DATA")
    flat: Sequence[Mapping[str, Any]] = (
        results.config(records[0])
        if stages and records
        else jobs_lib.flat_configs([stage.config() for stage in stages])
    )
    # If the settings are not published, the table may still give optimizer and batch.
    optimizer, batch = setting(flat[0] if flat else {**cell.overrides, **cell.first})
    folder = pathlib.Path("runs", table.key, f"{cell.name}-{scale.name}")
    return CellRow(
        cell=cell,
        id="",
        published=summary.published,
        known=cell.known if summary.published else "",
        measured=measured(summary, metric),
        further=(
            *(column_value(summary, key) for key in table.columns),
            *planned.columns(table, scale, cell, plans),
        ),
        distance=difference(summary, metric),
        seeds=len(records),
        status=summary.status,
        state=_state(summary, standing, group),
        by_seed=tuple((record["seed"], divergence.text(record, metric)) for record in records),
        search=summary.search,
        old="" if records else stale_mean(summary, metric),
        stale=stale(summary, metric),
        hours=sum(record["seconds"] for record in records) / 3600,
        machines=tuple(sorted(set(map(machine, records)))),
        run="" if cell.unknown else _run_command(table, scale, cell),
        commands=tuple(jobs_lib.commands(folder, stages)),
        configs=tuple(
            Config(stage.recipe, tuple((key, repr(value)) for key, value in sorted(values.items())))
            for stage, values in zip(stages, flat)
        ),
        standing=standing,
        group=group,
        label=label,
        optimizer=optimizer,
        batch=batch,
        planned="" if records else planned.instead(scale, cell, plans),
    )


def _run_command(table: Table, scale: Scale, cell: Cell) -> str:
    run = f"python -m lamb_tpu.reproduce run {table.key} --cells={cell.name} --scale={scale.name}"
    if table.form and table.tuning is not None:
        run += f" --tune={len(table.tuning.factors)}"
    return run + " --data=DATA" * any(scale.data)


def setting(flat: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the optimizer and batch size of a flattened config, or of its first phase."""
    phase = min((key.split(".")[1] for key in flat if key.startswith("phases.")), default="")
    optimizer, batch = (
        flat.get(f"phases.{phase}.{key}", flat.get(key, ""))
        for key in ("optimizer.name", "batch_size")
    )
    # Stored values may have any type.
    return (
        lines_lib.optimizer_name(str(optimizer)),
        f"{batch:,}" if isinstance(batch, int) else str(batch),
    )


def _state(summary: Summary, standing: Status, group: str) -> str:
    if standing is Status.PLANNED:
        return "planned"
    if summary.cell.unknown:
        return "unknown"
    if summary.records:
        if summary.status != "measured":
            return "begun"
        return "other" if group == Status.OTHER.value else "measured"
    return "stale" if summary.stale else "open"


def _line(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    text = _line(text)
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def papers(pages: Sequence[Page]) -> list[tuple[Paper, list[Page]]]:
    """Returns the pages of each paper: published papers first, then studies of this project.

    Within a paper, numbered tables come first.
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
    """Formats a duration, such as '3.2 hours', '5.0 minutes' or '4 seconds'."""
    if hours >= 1:
        return f"{hours:.1f} hours"
    minutes = 60 * hours
    return f"{minutes:.1f} minutes" if minutes >= 1 else f"{60 * minutes:.0f} seconds"


def total(pages: Sequence[Page]) -> tuple[int, int, int, float]:
    """Returns the numbers of runnable cells, of cells with a run, and of runs, and the total hours.

    A cell that was run at several scales counts once.
    """
    cells = collections.Counter[tuple[str, str]]()
    for page in pages:
        for part in page.parts:
            for row in part.rows:
                if not row.cell.unknown:
                    cells[page.table.key, row.cell.name] += row.seeds
    return (
        len(cells),
        sum(count > 0 for count in cells.values()),
        sum(cells.values()),
        sum(page.hours for page in pages),
    )
