"""Reads the papers' tables from TOML files: published values, and recipes that reproduce them.

A folder of papers has one folder for each, such as experiments/lamb, with paper.toml:

    title = "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    arxiv = "1904.00962"
    name = "LAMB"
    missing = [{what = "the ablations", why = "no recipe yet"}]    # what no table has

and a file for each table, such as mnist.toml, which is then the table lamb/mnist:

    title = "MNIST: LeNet at batch 1,024, 30 epochs"
    source = "appendix"                # the table's place in the paper
    known = "recalled"                 # seen: somebody read the paper's values; recalled: not so
    metric = {key = "accuracy", label = "test accuracy", digits = 4}
    columns = ["updates", "average_batch"]    # optional: shown beside the metric

    [scales.paper]                     # what the paper ran; also small, smoke
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
    factors = [0.5, 1, 2]              # times the cell's own value
    overrides = {"data.train_split" = "train[:90%]", "data.eval_split" = "train[90%:]"}

    [tune]                             # optional: where `run --tune=N` searches
    range = [0.125, 8]                 # times the cell's own value

A run's config is the scale's, with the cell's argument and with the overrides of both. A value that
begins with DATA/ is a path below the folder that --data names. Cells that all have a `row` and a
`column` are shown as a matrix. `lamb_tpu.reproduce.tables` describes every
key.
"""

import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from lamb_tpu import trust
from lamb_tpu.config import recipe_folder, recipe_path
from lamb_tpu.errors import UserError
from lamb_tpu.files import reading
from lamb_tpu.reproduce.tables import (
    COLUMNS,
    SCALES,
    Cell,
    Metric,
    Paper,
    Scale,
    Space,
    Table,
    Tuning,
)

_PAPER_FILE = "paper.toml"
TRUST_FLAG = "--trust-papers"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def folder() -> pathlib.Path:
    """Returns the folder of the shipped papers: `experiments` of this checkout."""
    return pathlib.Path(__file__).resolve().parents[2] / "experiments"


def load_all(papers: pathlib.Path, trusted: bool = False) -> dict[str, Table]:
    """Reads every table of a folder of papers.

    Args:
      papers: the folder.
      trusted: whether tables may name any recipe file and any custom code. Otherwise only shipped
        recipes, and code that the user's own modules define.

    Raises:
      UserError: the folder has no papers, or a file has a mistake; the message names file and key.
    """
    found: dict[str, Table] = {}
    for file in sorted(papers.glob(f"*/{_PAPER_FILE}")):
        paper = _paper(file)
        for path in sorted(file.parent.glob("*.toml")):
            if path.name != _PAPER_FILE:
                table = _table(path, paper)
                if not trusted:
                    _check_code(table)
                found[table.key] = table
    if not found:
        raise UserError(
            f"--papers {papers} has no tables; give a folder with one folder for each paper, in it "
            f"{_PAPER_FILE} and a .toml file for each table"
        )
    return found


def _check_code(table: Table) -> None:
    """Rejects a table that would run code of the folder's author: a recipe file, a custom name."""
    recipes = [recipe for scale in table.scales.values() for recipe in scale.stages]
    recipes += [recipe for cell in table.cells.values() for recipe in cell.stages]
    for recipe in dict.fromkeys(recipes):
        file = pathlib.Path(recipe_path(recipe.partition(":")[0]))
        if file.exists() and not file.resolve().is_relative_to(recipe_folder().resolve()):
            raise UserError(
                f"{table.path} names the recipe {recipe!r}, a file of Python code that is not one "
                f"of the shipped recipes; give {TRUST_FLAG} if you trust the author of that folder"
            )
    chosen: list[Mapping[str, Any]] = [
        table.space.overrides,
        *(scale.overrides for scale in table.scales.values()),
    ]
    for cell in table.cells.values():
        chosen += [cell.overrides, cell.first, cell.search]
    if table.tuning is not None:
        chosen.append(table.tuning.overrides)
    for overrides in chosen:
        trust.check(overrides, table.path, TRUST_FLAG)


class _Section:
    """A section of a TOML file, whose keys are taken one by one; those left over are mistakes."""

    def __init__(self, path: pathlib.Path, values: Any, where: str = "") -> None:
        self.path, self._where, self._known = path, where, list[str]()
        if not isinstance(values, dict):
            raise UserError(f"{path}: {where} is {values!r}; it must be a section of keys")
        self._values = dict(values)

    def take(self, key: str, kind: Any, default: Any = None) -> Any:
        """Returns a value of a type; without a default it must be there."""
        self._known.append(key)
        if key not in self._values:
            if default is None:
                raise self.error(f"{self._name(key)} is missing")
            return default
        value = self._values.pop(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{self._name(key)} is {value!r}; it must be of type {kind.__name__}")
        return value

    def choice(self, key: str, known: Iterable[str], default: str | None = None) -> str:
        """Returns a value that is one of some words."""
        value = self.take(key, str, default)
        if value not in known:
            raise self.error(f"{self._name(key)} is {value!r}; known: {', '.join(known)}")
        return str(value)

    def section(self, key: str) -> "_Section":
        """Returns a section within this one; empty if it is missing."""
        return _Section(self.path, self.take(key, dict, {}), self._name(key))

    def items(self) -> list[tuple[str, Any]]:
        """Takes all that is left."""
        left, self._values = self._values, {}
        return list(left.items())

    def is_empty(self) -> bool:
        """Returns whether nothing is left to take."""
        return not self._values

    def end(self) -> None:
        """Refuses keys that nobody has taken."""
        if self._values:
            raise self.error(
                f"{self._name(next(iter(self._values)))} is unknown; known: "
                f"{', '.join(self._known)}"
            )

    def error(self, text: str) -> UserError:
        """Returns an error that names the file."""
        return UserError(f"{self.path}: {text}")

    def _name(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def _read(path: pathlib.Path) -> _Section:
    try:
        return _Section(path, tomllib.loads(reading.read_text(path)))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML ({error})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None


def _paper(path: pathlib.Path) -> Paper:
    section = _read(path)
    missing = []
    for number, values in enumerate(section.take("missing", list, []), start=1):
        part = _Section(path, values, f"missing[{number}]")
        missing.append((part.take("what", str), part.take("why", str)))
        part.end()
    paper = Paper(
        path.parent.name,
        section.take("title", str),
        section.take("arxiv", str, ""),
        section.take("about", str, ""),
        section.take("name", str, path.parent.name),
        tuple(missing),
    )
    section.end()
    return paper


def _table(path: pathlib.Path, paper: Paper) -> Table:
    section = _read(path)
    known = section.choice("known", ("seen", "recalled", ""), "")
    metric = _metric(section.section("metric"))
    scales = {}
    for name, values in section.section("scales").items():
        if name not in SCALES:
            raise section.error(f"scales.{name} is unknown; known: {', '.join(SCALES)}")
        scales[name] = _scale(_Section(path, values, f"scales.{name}"), name, metric)
    if not scales:
        raise section.error("scales is missing; give at least [scales.paper] with its config")
    cells: dict[str, Cell] = {}
    for number, values in enumerate(section.take("cells", list), start=1):
        part = _Section(path, values, f"cells[{number}]")
        cell = _cell(part, known, scales)
        if cell.name in cells:
            raise section.error(f"cells[{number}].name is {cell.name!r}, which another cell has")
        cells[cell.name] = cell
    tuning = section.section("tuning")
    for cell in cells.values():
        if cell.tuned_by and (cell.tuned_by not in cells or tuning.is_empty()):
            raise section.error(
                f"cell {cell.name} has tuned_by {cell.tuned_by!r}; it must be another cell, of a "
                "table with [tuning]"
            )
        if cell.baseline and cell.baseline not in cells:
            raise section.error(
                f"cell {cell.name} has baseline {cell.baseline!r}; it must be another cell: "
                f"{', '.join(cells)}"
            )
    if any(bool(cell.row) != bool(cell.column) for cell in cells.values()) or (
        len({bool(cell.row) for cell in cells.values()}) > 1
    ):
        raise section.error("all cells must have a row and a column, or none")
    table = Table(
        f"{paper.key}/{path.stem}",
        path,
        paper,
        section.take("title", str),
        section.take("source", str, ""),
        section.take("about", str, ""),
        {name: scales[name] for name in SCALES if name in scales},
        cells,
        None if tuning.is_empty() else _tuning(tuning),
        _space(section.section("tune")),
        columns=_columns(section),
    )
    section.end()
    return table


def _columns(section: _Section) -> tuple[str, ...]:
    columns = section.take("columns", list, [])
    if not all(isinstance(key, str) and key in COLUMNS for key in columns):
        raise section.error(f"columns is {columns!r}; give a list of some of: {', '.join(COLUMNS)}")
    return tuple(columns)


def _metric(section: _Section) -> Metric:
    metric = Metric(
        section.take("key", str),
        section.take("label", str),
        section.take("digits", int, 4),
        section.choice("better", ("higher", "lower"), "higher"),
        section.take("factor", float, 1.0),
    )
    section.end()
    return metric


def _stages(section: _Section, where: str, needed: bool) -> tuple[str, ...]:
    """Takes `config`, one recipe, or `stages`, several; none if both are missing and not needed."""
    stages = section.take("stages", list, [])
    config = section.take("config", str, "")
    if (
        (stages and config)
        or (needed and not stages and not config)
        or not all(isinstance(stage, str) for stage in stages)
    ):
        raise section.error(
            f"{where} must have either config, a recipe such as 'mnist_lenet:batch=4096', or "
            "stages, a list of recipes"
        )
    return tuple(stages) if stages else (config,) if config else ()


def _scale(section: _Section, name: str, metric: Metric) -> Scale:
    stages = _stages(section, f"scales.{name}", needed=True)
    own = section.take("metric", dict, {})
    data = section.take("data", list, [""] * len(stages))
    if len(data) != len(stages) or not all(isinstance(item, str) for item in data):
        raise section.error(
            f"scales.{name}.data is {data!r}; give a list of one folder for each of the "
            f"{len(stages)} stages, '' for a stage without"
        )
    scale = Scale(
        name,
        stages,
        _metric(_Section(section.path, own, f"scales.{name}.metric")) if own else metric,
        _dotted(section.take("overrides", dict, {})),
        section.take("seeds", int, 1),
        section.take("about", str, ""),
        tuple(data),
        section.take("hardware", str, ""),
        _minutes(section.section("minutes")),
        section.take("examples", int, 0),
        section.take("cpu_devices", int, 1),
    )
    if scale.seeds < 1:
        raise section.error(f"scales.{name}.seeds is {scale.seeds}; it must be at least 1")
    if scale.cpu_devices < 1:
        raise section.error(
            f"scales.{name}.cpu_devices is {scale.cpu_devices}; it must be at least 1"
        )
    section.end()
    return scale


def _minutes(section: _Section) -> dict[str, float]:
    minutes = {}
    for platform in ("cpu", "gpu", "tpu"):
        if value := section.take(platform, float, 0.0):
            minutes[platform] = value
    section.end()
    return minutes


def _cell(section: _Section, known: str, scales: Mapping[str, Scale]) -> Cell:
    name = section.take("name", str)
    if not _NAME.fullmatch(name):
        raise section.error(
            f"the cell's name {name!r} must be of lower-case letters, digits and . _ -, because it "
            "names folders"
        )
    published = section.section("published").items()
    for key, value in published:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise section.error(f"published.{key} of cell {name} is {value!r}; give a number")
    cell = Cell(
        name,
        section.take("argument", str, ""),
        _stages(section, f"cell {name}", needed=False),
        _dotted(section.take("overrides", dict, {})),
        _dotted(section.take("first", dict, {})),
        dict(published),
        section.choice("known", ("seen", "recalled"), known) if published else "",
        section.take("unknown", str, ""),
        section.take("tuned_by", str, ""),
        _dotted(section.take("search", dict, {})),
        section.take("baseline", str, ""),
        section.take("row", str, ""),
        section.take("column", str, ""),
    )
    if cell.first and any(len(cell.stages or scale.stages) < 2 for scale in scales.values()):
        raise section.error(
            f"cell {name} has keys of the first of several stages, and a scale has only one stage; "
            "give them as overrides"
        )
    fewest = min(scales.values(), key=lambda scale: len(scale.stages))
    if len(cell.stages) > len(fewest.stages):
        raise section.error(
            f"cell {name} has {len(cell.stages)} stages; the scale {fewest.name} has "
            f"{len(fewest.stages)}, of which a cell's replace the last"
        )
    section.end()
    return cell


def _tuning(section: _Section) -> Tuning:
    factors = section.take("factors", list)
    if not factors or not all(type(x) in (int, float) and x > 0 for x in factors):
        raise section.error(f"tuning.factors is {factors!r}; give numbers above 0")
    tuning = Tuning(
        section.take("key", str),
        tuple(map(float, factors)),
        _dotted(section.take("overrides", dict, {})),
        section.take("seeds", int, 1),
    )
    section.end()
    return tuning


def _space(section: _Section) -> Space:
    default = Space()
    bounds = section.take("range", list, [default.low, default.high])
    if (
        len(bounds) != 2
        or not all(type(x) in (int, float) for x in bounds)
        or (not 0 < bounds[0] < bounds[1])
    ):
        raise section.error(
            f"tune.range is {bounds!r}; give two numbers above 0, the smaller first"
        )
    space = Space(
        section.take("key", str, default.key),
        float(bounds[0]),
        float(bounds[1]),
        {**default.overrides, **_dotted(section.take("overrides", dict, {}))},
    )
    section.end()
    return space


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {'optimizer.b2': 0.98} for {'optimizer': {'b2': 0.98}}, and what is so already."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= (
            _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found
