"""Prints tables: the paper's values beside those measured here, and the commands of each cell."""

import pathlib
from collections.abc import Mapping, Sequence

from lamb_tpu.reproduce import engine, tuning
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.choosing import choose_cells, choose_scale
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary, further, matrix, measured, stale, summaries
from lamb_tpu.reproduce.tables import COLUMNS, Scale, Table
from lamb_tpu.terminal import columns, fit


def show_list(tables: Mapping[str, Table]) -> None:
    """Prints each paper with its tables and how many of their cells are measured."""
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
            for scale in form.measured_scales():
                found = summaries(form, scale, results)
                count = sum(bool(summary.values) for summary in found)
                where = scale.name + (form.form and f" {form.form}")
                counts.append(f"{where} {count} of {len(found)}")
        print(fit(f"  {table.key}  {table.title}"))
        source = f"{table.source}; " if table.source else ""
        print(fit(f"    {source}measured: {', '.join(counts)}"))


def show(tables: Sequence[Table], records: pathlib.Path | None) -> None:
    """Prints the cells of some tables: the paper's value, ours, and their distance.

    Args:
      tables: the tables.
      records: folder of records of one's own; None: those beside the tables.
    """
    for number, table in enumerate(tables):
        if number:
            print()
        show_head(table)
        for form in tuning.forms(table, records):
            results = Results(form, records)
            for scale in form.measured_scales():
                show_scale(form, scale, results)


def show_head(table: Table) -> None:
    """Prints the title of a table, its place in the paper, and what to know about it."""
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
    print(
        fit(
            f"{scale.name}: {metric.label} ({metric.better} is better)"
            + (about and f"; {about}")
            + (scale.cost and f"; {scale.cost}")
        )
    )
    found = summaries(table, scale, results)
    told, notes = found, list[str]()
    if grid := matrix(found, metric):
        print(columns(grid))
        if any(summary.published for summary in found):
            print("  In parentheses: the paper's.")
        if names := [summary.cell.name for summary in found if summary.status == "not run"]:
            notes.append(f"not run: {', '.join(names)}")
        # It has every cell already; the rows are those with more to tell.
        told = [
            summary
            for summary in found
            if summary.status != "not run"
            and (table.columns or summary.published or summary.status != "measured")
        ]
    for summary in found:
        if summary.search:
            notes.append(f"{summary.cell.name}: {summary.search}")
        if text := stale(summary, metric):
            notes.append(f"{summary.cell.name}: {text}")
    if grid and (told or notes):
        print()
    if told:
        heads = [COLUMNS[key] for key in table.columns]
        head = ("cell", "paper", "measured", *heads, "difference", "seeds", "")
        print(columns([head, *(_row(summary, table, scale) for summary in told)]))
    for note in notes:
        print(fit(f"  {note}"))


def _row(summary: Summary, table: Table, scale: Scale) -> tuple[str, ...]:
    metric = scale.metric
    known = f" ({summary.cell.known})" if summary.published else ""
    distance = summary.distance
    return (
        summary.cell.name,
        summary.published + known,
        measured(summary, metric) or "-",
        *(further(summary, key) for key in table.columns),
        "" if distance is None else f"{distance:+.{metric.digits}f}",
        str(len(summary.values) or ""),
        summary.status,
    )


def show_commands(tables: Sequence[Table], scale: str | None, cells: str | None) -> None:
    """Prints the commands that train each cell with seed 0."""
    for table in tables:
        size = choose_scale(table, scale, "paper")
        print(f"# {table.key}, {size.name}" + (f": {size.cost}" if size.cost else ""))
        if table.tuning is not None:
            print(f"# {table.tuning.key} is that of the recipe; `run` searches it first")
        for cell in choose_cells(table, size, cells):
            stages = jobs_lib.stages(Job(table, size, cell, 0))
            for stage in stages:
                stage.config()  # a command that is printed must be one that works
            workdir = f"runs/{table.key}/{cell.name}"
            folders = engine.stage_folders(pathlib.Path(workdir), stages)
            for number, (stage, folder) in enumerate(zip(stages, folders)):
                before = f" --config.init_from={folders[number - 1]}" if number else ""
                print(stage.command(str(folder)) + before)
