"""Prints tables: the paper's values beside the measured values."""

import pathlib
from collections.abc import Mapping, Sequence

from lamb_tpu.reproduce import planned, tuning
from lamb_tpu.reproduce import status as status_lib
from lamb_tpu.reproduce.planned import Planned
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import (
    Summary,
    column_value,
    cost,
    criterion,
    difference,
    matrix,
    measured,
    stale,
    summaries,
)
from lamb_tpu.reproduce.tables import COLUMNS, Scale, Table
from lamb_tpu.terminal import columns, fit


def show_list(tables: Mapping[str, Table]) -> None:
    """Prints each paper with its tables and the number of measured cells."""
    paper = None
    for table in tables.values():
        if table.paper != paper:
            if paper is not None:
                print()
            paper = table.paper
            print(fit(f"{paper.title}" + (f" (arXiv:{paper.arxiv})" if paper.arxiv else "")))
        counts = []
        for form in tuning.forms(table, None):
            results = Results(form)
            results.warn()
            for scale in form.measured_scales():
                cells = summaries(form, scale, results)
                count = sum(bool(summary.values) for summary in cells)
                where = scale.name + (form.form and f" {form.form}")
                counts.append(f"{where} {count} of {len(cells)}")
        print(fit(f"  {table.key}  {table.title}"))
        source = f"{table.source}; " if table.source else ""
        print(fit(f"    {source}measured: {', '.join(counts)}"))


def show(tables: Sequence[Table], records: pathlib.Path | None) -> None:
    """Prints the cells of some tables: the paper's value, the measured value, and the difference.

    `records` is the folder of the user's records; None uses the records beside the tables.
    """
    for number, table in enumerate(tables):
        if number:
            print()
        show_head(table)
        for form in tuning.forms(table, records):
            results = Results(form, records)
            results.warn()
            for scale in form.measured_scales():
                show_scale(form, scale, results)


def show_head(table: Table) -> None:
    """Prints the title of a table, its source in the paper, and notes about the table."""
    print(fit(f"{table.key}: {table.title}"))
    where = ", ".join(
        filter(None, [table.paper.arxiv and f"arXiv:{table.paper.arxiv}", table.source])
    )
    if where:
        print(fit(where))
    if table.about:
        print(fit(" ".join(table.about.split())))


def show_scale(table: Table, scale: Scale, results: Results) -> None:
    """Prints the cells of a table at one scale."""
    metric = scale.metric
    print()
    about = "; ".join(filter(None, [tuning.describe(table), " ".join(scale.about.split())]))
    cells = summaries(table, scale, results)
    cost_text = cost(scale, cells)
    print(
        fit(
            f"{scale.name}: {metric.label} ({metric.better} is better)"
            + (about and f"; {about}")
            + (cost_text and f"; {cost_text}")
        )
    )
    listed, notes = cells, list[str]()
    plans = planned.of_table(table)
    planned_texts = {
        summary.cell.name: planned.instead(scale, summary.cell, plans) for summary in cells
    }
    if grid := matrix(cells, metric, planned_texts):
        print(columns(grid))
        if any(summary.published for summary in cells):
            print("  In parentheses: the paper's values.")
        if names := [summary.cell.name for summary in cells if summary.status == "not run"]:
            notes.append(f"not run: {', '.join(names)}")
        # The matrix has every cell; list only cells with more information.
        listed = [
            summary
            for summary in cells
            if summary.status != "not run"
            and (table.columns or summary.published or summary.status != "measured")
        ]
    for summary in cells:
        if summary.search:
            notes.append(f"{summary.cell.name}: {summary.search}")
        if text := stale(summary, metric):
            notes.append(f"{summary.cell.name}: {text}")
    if text := criterion(cells, metric):
        notes.append(text)
    if grid and (listed or notes):
        print()
    if listed:
        heads = [*(COLUMNS[key] for key in table.columns), *planned.heads(table, plans)]
        head = ("cell", "paper", "measured", *heads, "difference", "seeds", "")
        print(columns([head, *(_row(summary, table, scale, plans) for summary in listed)]))
    if plans and scale.name == planned.SCALE:
        notes += [planned.NOTE, *(f"{each.cell}: {each.command}" for each in plans)]
    for note in notes:
        print(fit(f"  {note}"))


def _row(summary: Summary, table: Table, scale: Scale, plans: Sequence[Planned]) -> tuple[str, ...]:
    metric = scale.metric
    known = f" ({summary.cell.known})" if summary.published else ""
    standing = status_lib.of(
        [scale.name] if summary.records else [], status_lib.is_planned(scale, summary.cell, plans)
    )
    _, label = status_lib.label(table, summary.cell, standing, summary.status)
    return (
        summary.cell.name,
        summary.published + known,
        measured(summary, metric) or "-",
        *(column_value(summary, key) for key in table.columns),
        *planned.columns(table, scale, summary.cell, plans),
        difference(summary, metric),
        str(len(summary.values) or ""),
        label,
    )
