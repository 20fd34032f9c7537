"""Reads the papers' tables from TOML files: published values, and the recipes that reproduce them.

A folder of papers has one subfolder per paper, such as experiments/lamb. Each contains paper.toml:

    title = "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    arxiv = "1904.00962"
    name = "LAMB"
    missing = [{what = "the ablations", why = "no recipe yet"}]    # results that no table covers

and one file per table. For example, mnist.toml defines the table lamb/mnist:

    title = "MNIST: LeNet at batch 1,024, 30 epochs"
    source = "appendix"                # where the table is in the paper
    known = "recalled"                 # seen: values read in the paper; recalled: from memory
    metric = {key = "accuracy", label = "test accuracy", digits = 4, chance = 0.1}
    columns = ["updates", "average_batch"]    # optional: shown beside the metric

    [scales.paper]                     # the paper's setting; also small, smoke
    config = "mnist_lenet:network=lenet"
    seeds = 5

    [scales.small]
    config = "mnist_lenet:network=lenet5"
    overrides = {"duration" = "10 epochs"}

    [[cells]]
    name = "lamb"
    argument = "optimizer=lamb"
    published = {accuracy = 0.9945}

    [tuning]                           # optional: a search before each cell is measured
    key = "optimizer.learning_rate"
    factors = [0.5, 1, 2]              # times the cell's default
    overrides = {"data.train_split" = "train[:90%]", "data.eval_split" = "train[90%:]"}

    [tune]                             # optional: range of the search by `run --tune=N`
    range = [0.125, 8]                 # times the cell's default

    [scales.smoke]                     # checks the commands on bundled data
    config = "mnist_lenet:smoke"
    over_cells = [{accumulation_steps = 1}]    # replaces values of the cells; one entry per stage

A run's config is the scale's config with the cell's argument and the overrides of scale and cell. A
value that starts with DATA/ is a path below the folder given by --data. If every cell has a `row` and a
`column`, the table is shown as a matrix. `lamb_tpu.reproduce.tables` describes every key, and
`lamb_tpu.reproduce.schema` has the types and bounds.
"""

import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict, replace

from lamb_tpu import trust
from lamb_tpu.config import recipe_folder, recipe_path
from lamb_tpu.errors import UserError, listed, unreadable
from lamb_tpu.files import reading
from lamb_tpu.files.schema import convert
from lamb_tpu.reproduce import schema
from lamb_tpu.reproduce.tables import (
    COLUMNS,
    SCALES,
    Cell,
    Metric,
    Paper,
    Scale,
    Space,
    Table,
    check_runs,
)
from lamb_tpu.run.metric import not_measured

_PAPER_FILE = "paper.toml"
TRUST_FLAG = "--trust-papers"
# Config overrides of the search runs of `run --tune=N`, unless the table gives others.
_HELD_OUT = {"data.train_split": "train[:90%]", "data.eval_split": "train[90%:]"}
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def folder() -> pathlib.Path:
    """Returns the folder of the shipped papers, in the installed wheel or else in this checkout."""
    installed = pathlib.Path(__file__).resolve().parents[1] / "experiments"
    return installed if installed.is_dir() else installed.parents[1] / "experiments"


def is_installed() -> bool:
    """Returns whether the shipped papers belong to an installed wheel, to which no records are added."""
    return folder().parent.name == "lamb_tpu" and (folder().parent / "reproduce").is_dir()


def load_all(papers: pathlib.Path, trusted: bool = False) -> dict[str, Table]:
    """Reads every table of a folder of papers.

    Unless `trusted`, tables may name only shipped recipes, and code in the user's modules outside the folder.
    """
    tables: dict[str, Table] = {}
    for file in sorted(papers.glob(f"*/{_PAPER_FILE}")):
        paper = _paper(file)
        for path in sorted(file.parent.glob("*.toml")):
            if path.name != _PAPER_FILE:
                table = _table(path, paper)
                if not trusted:
                    _check_code(table)
                tables[table.key] = table
    if not tables:
        raise UserError(
            "--papers",
            str(papers),
            "has no tables",
            f"give a folder with one subfolder per paper, each with {_PAPER_FILE} and a .toml "
            "file per table",
        )
    return tables


def _check_code(table: Table) -> None:
    """Rejects a table that names code of the folder's author: a recipe file or custom code."""
    recipes = [recipe for scale in table.scales.values() for recipe in scale.stages]
    recipes += [recipe for cell in table.cells.values() for recipe in cell.stages]
    for recipe in dict.fromkeys(recipes):
        file = pathlib.Path(recipe_path(recipe.partition(":")[0]))
        if file.exists() and not file.resolve().is_relative_to(recipe_folder().resolve()):
            raise UserError(
                f"{table.path}: recipe",
                recipe,
                "is a file of Python code that is not a shipped recipe",
                f"use a shipped recipe, or give {TRUST_FLAG} if you trust the author of --papers",
            )
    sections: list[Mapping[str, Any]] = [
        table.space.overrides,
        *(scale.overrides for scale in table.scales.values()),
        *(changes for scale in table.scales.values() for changes in scale.over_cells),
    ]
    for cell in table.cells.values():
        sections += [cell.overrides, cell.first, cell.search]
    if table.tuning is not None:
        sections.append(table.tuning.overrides)
    for overrides in sections:
        trust.check(overrides, table.path, TRUST_FLAG)


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return reading.read_toml(path)
    except tomllib.TOMLDecodeError as error:
        raise UserError(path, problem=f"is not TOML ({error})", remedy="correct it") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "correct it") from None


def _paper(path: pathlib.Path) -> Paper:
    form = convert(_read(path), schema.PaperForm, path)
    return Paper(
        key=path.parent.name,
        title=form.title,
        arxiv=form.arxiv,
        about=form.about,
        name=form.name or path.parent.name,
        missing=tuple((each.what, each.why) for each in form.missing),
    )


def _table(path: pathlib.Path, paper: Paper) -> Table:
    form = convert(_read(path), schema.TableForm, path)
    _check_metric(form.metric, path, "metric")
    scales = {
        name: _scale(path, name, part, form.metric)
        for name in SCALES
        if (part := getattr(form.scales, name)) is not None
    }
    if not scales:
        raise UserError(
            f"{path}: scales", ..., "is missing", "give at least [scales.paper] with its config"
        )
    cells = _cells(path, form, scales)
    if not set(form.columns) <= set(COLUMNS):
        raise UserError(
            f"{path}: columns", form.columns, "has an unknown name", f"use any of {listed(COLUMNS)}"
        )
    tuning = form.tuning and replace(form.tuning, overrides=_dotted(form.tuning.overrides))
    for scale in scales.values():
        check_runs(f"{path}: the scale {scale.name}", cells.values(), scale.seeds, tuning)
    return Table(
        key=f"{paper.key}/{path.stem}",
        path=path,
        paper=paper,
        title=form.title,
        source=form.source,
        about=form.about,
        scales=scales,
        cells=cells,
        tuning=tuning,
        space=_space(path, form.tune),
        columns=tuple(form.columns),
    )


def _check_metric(metric: Metric, path: pathlib.Path, where: str) -> None:
    if reason := not_measured(metric.key):
        problem, _, remedy = reason.partition("; ")
        raise UserError(f"{path}: {where}.key", metric.key, f"is {problem}", remedy)
    if metric.chance is not None and metric.better == "higher" and metric.chance >= 1:
        raise UserError(
            f"{path}: {where}.chance",
            metric.chance,
            "is not below 1, although higher values are better",
            "use a fraction, such as 0.1 for the accuracy of guessing among 10 classes",
        )


def _stages(
    path: pathlib.Path, form: schema.ScaleForm | schema.CellForm, where: str, needed: bool
) -> tuple[str, ...]:
    """Returns `stages`, or `config` as the only stage; () if both are missing, which `needed` forbids."""
    stages, config = tuple(form.stages), form.config
    has_both = stages and config is not None
    if has_both or (needed and not stages and config is None):
        problem = "has both config and stages" if has_both else "has neither config nor stages"
        remedy = (
            "give either config (a recipe, such as 'mnist_lenet:batch=4096') or stages (a list)"
        )
        raise UserError(f"{path}: {where}", problem=problem, remedy=remedy)
    return stages if config is None else (config,)


def _scale(path: pathlib.Path, name: str, form: schema.ScaleForm, metric: Metric) -> Scale:
    stages = _stages(path, form, f"scales.{name}", needed=True)
    data = ("",) * len(stages) if form.data is None else tuple(form.data)
    if len(data) != len(stages):
        raise UserError(
            f"{path}: scales.{name}.data",
            form.data,
            f"must have one entry per stage, {len(stages)} in all",
            "use '' for a stage without data",
        )
    if form.over_cells and len(form.over_cells) != len(stages):
        raise UserError(
            f"{path}: scales.{name}.over_cells",
            problem=f"has {len(form.over_cells)} entries for {len(stages)} stage(s)",
            remedy="give one entry per stage ({} if a stage has no changes)",
        )
    if form.metric is not None:
        _check_metric(form.metric, path, f"scales.{name}.metric")
    values = asdict(form) | {
        "name": name,
        "stages": stages,
        "metric": form.metric or metric,
        "overrides": _dotted(form.overrides),
        "data": data,
        "minutes": {key: value for key, value in asdict(form.minutes).items() if value},
        "over_cells": tuple(map(_dotted, form.over_cells)),
    }
    return Scale(**{field: values[field] for field in Scale._fields})


def _cells(
    path: pathlib.Path, form: schema.TableForm, scales: Mapping[str, Scale]
) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for number, entry in enumerate(form.cells, start=1):
        cell = _cell(path, entry, form.known, scales)
        if cell.name in cells:
            raise UserError(
                f"{path}: cells[{number}].name",
                cell.name,
                "is the name of another cell",
                "rename one of them",
            )
        cells[cell.name] = cell
    for cell in cells.values():
        if cell.tuned_by and (cell.tuned_by not in cells or form.tuning is None):
            raise UserError(
                f"{path}: tuned_by of cell {cell.name}",
                cell.tuned_by,
                "is not a cell, or the table has no [tuning]",
                "use the name of another cell, and give [tuning]",
            )
        if cell.baseline and cell.baseline not in cells:
            raise UserError(
                f"{path}: baseline of cell {cell.name}",
                cell.baseline,
                "is not a cell of the table",
                f"use {listed(cells)}",
            )
    if {(bool(cell.row), bool(cell.column)) for cell in cells.values()} not in (
        {(True, True)},
        {(False, False)},
    ):
        raise UserError(
            f"{path}: cells",
            problem="do not all have a row and a column",
            remedy="give both to every cell, or to no cell",
        )
    return cells


def _cell(
    path: pathlib.Path, form: schema.CellForm, known: str, scales: Mapping[str, Scale]
) -> Cell:
    name = form.name
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{path}: name of a cell",
            name,
            "cannot name a folder",
            "use lower-case letters, digits and . _ -",
        )
    published: dict[str, Any] = {
        key: convert(value, schema.Published, path, f"published.{key} of cell {name}")
        for key, value in form.published.items()
    }
    values = asdict(form) | {
        "stages": _stages(path, form, f"cell {name}", needed=False),
        "overrides": _dotted(form.overrides),
        "first": _dotted(form.first),
        "published": published,
        "known": (form.known or known) if published else "",
        "search": _dotted(form.search),
    }
    cell = Cell(**{field: values[field] for field in Cell._fields})
    if published and not cell.known:
        raise UserError(
            f"{path}: known of cell {name}",
            problem="is missing for its published values",
            remedy="give 'seen' or 'recalled', for the cell or the table",
        )
    if cell.first and any(len(cell.stages or scale.stages) < 2 for scale in scales.values()):
        raise UserError(
            f"{path}: first of cell {name}",
            problem="has keys of the first of several stages, but a scale has only one stage",
            remedy="give these keys as overrides",
        )
    fewest = min(scales.values(), key=lambda scale: len(scale.stages))
    if len(cell.stages) > len(fewest.stages):
        raise UserError(
            f"{path}: stages of cell {name}",
            problem=f"has {len(cell.stages)} entries, which replace the last stages of a scale, but the "
            f"scale {fewest.name} has only {len(fewest.stages)} stage(s)",
            remedy=f"give at most {len(fewest.stages)} entries",
        )
    return cell


def _space(path: pathlib.Path, space: Space) -> Space:
    if not space.range[0] < space.range[1]:
        remedy = "use two numbers above 0, the smaller first"
        raise UserError(f"{path}: tune.range", [*space.range], "does not ascend", remedy)
    return replace(space, overrides={**_HELD_OUT, **_dotted(space.overrides)})


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {'optimizer.b2': 0.98} for {'optimizer': {'b2': 0.98}}; dotted keys stay as they are."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
