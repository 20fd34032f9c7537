"""Writes the report: a Markdown page and pictures for each table, and the same as HTML.

Two reports of the same records are equal byte for byte: nothing of the time or the machine of their
making is in them.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jinja2
import matplotlib

from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary, matrix, measured, stale, summaries
from lamb_tpu.reproduce.tables import Scale, Table

# The text below each picture.
CAPTIONS = {
    "batches": "Mean over the seeds with its 95 % interval (Student's t); a small point is a seed.",
    "training": "A line for each seed.",
    "ratios": "Trust ratio of each layer, of seed 0; dark to bright from the first layer to the "
    "last.",
}


class Row(NamedTuple):
    """A cell of a table at a scale, as text for a page.

    Attributes:
      name, published, known, measured, distance, seeds, status: see `Summary`.
      by_seed: the value of each seed.
      search: see `Summary`.
      stale: what changed since records that no longer hold; '' if none.
      minutes: mean time of a run.
      machine: where the runs were made.
      commands: the commands that train the cell with seed 0, one for each stage.
      config: lines 'key = value' of the resolved config of the last stage.
    """

    name: str
    published: str
    known: str
    measured: str
    distance: str
    seeds: int
    status: str
    by_seed: str
    search: str
    stale: str
    minutes: str
    machine: str
    commands: tuple[str, ...]
    config: tuple[str, ...]


class Part(NamedTuple):
    """A table at one scale: its rows, and file names of its pictures by kind.

    `matrix` has the same values as lines of a matrix; it is empty if cells have no place in one.
    """

    scale: Scale
    about: str
    matrix: list[list[str]]
    rows: tuple[Row, ...]
    pictures: Mapping[str, str]


class Page(NamedTuple):
    """The page of a table; `num_measured` of its `num_cells` are measured, over all scales."""

    table: Table
    about: str
    slug: str
    parts: tuple[Part, ...]
    num_measured: int
    num_cells: int


def write(
    tables: Mapping[str, Table], output: pathlib.Path, html: pathlib.Path | None,
    records: pathlib.Path | None = None,
) -> None:
    """Writes the report and prints where it lies.

    Args:
      tables: every table.
      output: folder of the Markdown pages and of PNG pictures.
      html: folder of the site with SVG pictures; None for none.
      records: folder of records of one's own; None: those beside the tables.

    Raises:
      UserError: a folder cannot be written, or records are damaged.
    """
    for folder, suffix in ((output, "png"), (html, "svg")):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror})") from None
        pages = [_page(table, folder, suffix, records) for table in tables.values()]
        kind = "md" if suffix == "png" else "html"
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
            autoescape=kind == "html", keep_trailing_newline=True,
        )
        environment.globals |= {"captions": CAPTIONS}
        index = "README.md" if kind == "md" else "index.html"
        _render(environment, f"index.{kind}", folder / index, pages=pages)
        for page in pages:
            _render(environment, f"table.{kind}", folder / f"{page.slug}.{kind}", page=page)
        print(folder / index)


def _render(environment: jinja2.Environment, name: str, path: pathlib.Path, **values: Any) -> None:
    writing.replace(path, environment.get_template(f"{name}.j2").render(**values))


def _page(
    table: Table, folder: pathlib.Path, suffix: str, records: pathlib.Path | None
) -> Page:
    results, slug, parts = Results(table, records), table.key.replace("/", "-"), []
    for scale in table.measured_scales():
        found = summaries(table, scale, results)
        names = {}
        for kind, figure in pictures.all_of(table, scale, found).items():
            names[kind] = f"{slug}-{scale.name}-{kind}.{suffix}"
            # A salt, because the identifiers in an SVG are random otherwise; no date, no version.
            with matplotlib.rc_context({"svg.hashsalt": "lamb_tpu"}):
                nothing: dict[str, None] = {"Date": None} if suffix == "svg" else {"Software": None}
                with writing.checked(folder / names[kind]):
                    figure.savefig(folder / names[kind], metadata=nothing)
        rows = tuple(_row(table, scale, summary, results) for summary in found)
        about, grid = _line(scale.about), matrix(found, scale.metric)
        parts.append(Part(scale, about[:1].upper() + about[1:], grid, rows, names))
    rows_of_all = [row for part in parts for row in part.rows]
    count = sum(row.seeds > 0 for row in rows_of_all)
    return Page(table, _line(table.about), slug, tuple(parts), count, len(rows_of_all))


def _row(table: Table, scale: Scale, summary: Summary, results: Results) -> Row:
    metric, records = scale.metric, summary.records
    if summary.cell.unknown:
        return Row(
            summary.cell.name, summary.published, summary.cell.known, "", "", 0, summary.status,
            "", "", "", "", "", (), (),
        )
    stages = jobs_lib.stages(Job(table, scale, summary.cell, 0))
    folders = engine.stage_folders(
        pathlib.Path("runs", table.key, f"{summary.cell.name}-{scale.name}"), stages
    )
    commands = tuple(
        stage.command(str(folder)) + (f" --config.init_from={folders[at - 1]}" if at else "")
        for at, (stage, folder) in enumerate(zip(stages, folders))
    )
    flat = (
        results.config(records[0]) if records
        else jobs_lib.flat_configs([stage.config() for stage in stages])
    )[-1]
    minutes = sum(record["seconds"] for record in records) / 60 / max(1, len(records))
    return Row(
        summary.cell.name, summary.published, summary.cell.known if summary.published else "",
        measured(summary, metric),
        "" if summary.distance is None else f"{summary.distance:+.{metric.digits}f}",
        len(records), summary.status,
        ", ".join(
            f"{record['seed']}: "
            + ("diverged" if value is None else f"{value:.{metric.digits}f}")
            for record, value in zip(records, summary.values)
        ),
        summary.search,
        stale(summary, metric),
        f"{minutes:.1f}" if records else "",
        "; ".join(sorted({
            f"{r['devices']} x {r['device']}, {r['cores']} cores, jax {r['jax']}, "
            f"commit {r['commit']}" for r in records
        })),
        commands, tuple(f"{key} = {value!r}" for key, value in sorted(flat.items())),
    )


def _line(text: str) -> str:
    return " ".join(text.split())
