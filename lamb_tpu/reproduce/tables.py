"""Tables of papers, read from TOML files: published values, and the recipes that reproduce them.

A folder of papers has one folder for each, such as experiments/lamb, with paper.toml:

    title = "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    arxiv = "1904.00962"

and a file for each table, such as mnist.toml, which is then the table lamb/mnist:

    title = "MNIST: LeNet at batch 1,024, 30 epochs"
    source = "appendix"                # the table's place in the paper
    known = "recalled"                 # seen: somebody read the paper's values; recalled: not so
    metric = {key = "accuracy", label = "test accuracy", digits = 4}

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

A run's config is the scale's, with the cell's argument and with the overrides of both. Cells that
all have a `row` and a `column` are shown as a matrix.
"""

import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lamb_tpu.errors import UserError
from lamb_tpu.files import reading

SCALES = ("smoke", "small", "paper")
_PAPER_FILE = "paper.toml"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


class Metric(NamedTuple):
    """The number that a table shows.

    Attributes:
      key: its key in a run's evaluation, such as 'accuracy'.
      label: its name for readers, such as 'test accuracy'.
      digits: decimals to show.
      better: 'higher' or 'lower'.
      factor: measured values times this are in the unit of the published ones, such as 100 where a
        paper gives percent.
    """

    key: str
    label: str
    digits: int = 4
    better: str = "higher"
    factor: float = 1.0


class Tuning(NamedTuple):
    """A search for one key of the config, alike for every cell, before the cell is measured.

    Attributes:
      key: the key, such as 'optimizer.learning_rate'.
      factors: the values are the cell's own times these.
      overrides: of the runs that search, such as a held-out part of the training set.
      seeds: runs of each value, with seeds from 0.
    """

    key: str
    factors: tuple[float, ...]
    overrides: Mapping[str, Any]
    seeds: int = 1


class Scale(NamedTuple):
    """A size at which a table can be run.

    Attributes:
      name: one of `SCALES`.
      stages: recipes with arguments, such as 'mnist_lenet:network=lenet5'; each starts from the
        weights of the one before, and the last is measured.
      metric: what is measured.
      overrides: keys of the last stage's config.
      seeds: how many runs of a cell the table asks for.
      about: how it differs from the paper's, for readers.
      data: folder below --data of each stage's data set; '' where it needs none.
      hardware: what a run needs, for readers.
    """

    name: str
    stages: tuple[str, ...]
    metric: Metric
    overrides: Mapping[str, Any]
    seeds: int
    about: str
    data: tuple[str, ...]
    hardware: str


class Cell(NamedTuple):
    """One setting of a table.

    Attributes:
      name: unique within the table.
      argument: of the first stage's recipe, such as 'optimizer=lamb'.
      overrides: keys of the last stage's config.
      first: keys of the first stage's config, where there are several stages.
      published: the paper's values by key of the metric; text for a run that failed there.
      known: 'seen', 'recalled' or '' if the paper has no value.
      only: scales at which the cell exists; empty: all.
      at: overrides for one scale, by its name.
      unknown: why the cell cannot be run, such as 'settings not published'; '' if it can.
      tuned_by: name of the cell whose search is this one's too, such as that of the smallest batch;
        '': its own.
      search: overrides of its runs that search, beside those of `Tuning`.
      row, column: its place in a matrix, such as 'LAMB' and '1,024'; '' if it has none.
    """

    name: str
    argument: str
    overrides: Mapping[str, Any]
    first: Mapping[str, Any]
    published: Mapping[str, float | str]
    known: str
    only: tuple[str, ...]
    at: Mapping[str, Mapping[str, Any]]
    unknown: str
    tuned_by: str
    search: Mapping[str, Any]
    row: str
    column: str


class Paper(NamedTuple):
    """A paper: folder name, title, arXiv identifier ('' if none) and what to know about it."""

    key: str
    title: str
    arxiv: str
    about: str


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
      key: such as 'lamb/mnist'.
      path: its file; the records of its runs lie beside it.
      paper: the paper.
      title: for readers.
      source: the table's place in the paper.
      about: for readers: what differs, how the values are known.
      scales: by name.
      cells: by name.
      tuning: the search before each measurement, or None.
    """

    key: str
    path: pathlib.Path
    paper: Paper
    title: str
    source: str
    about: str
    scales: Mapping[str, Scale]
    cells: Mapping[str, Cell]
    tuning: Tuning | None

    def measured_scales(self) -> list[Scale]:
        """Returns the scales whose runs are results, the paper's own first."""
        return [self.scales[name] for name in ("paper", "small") if name in self.scales]

    @property
    def records(self) -> pathlib.Path:
        """The file of its measured runs."""
        return self.path.with_suffix(".jsonl")


def folder() -> pathlib.Path:
    """Returns the folder of the shipped papers: `experiments` of this checkout."""
    return pathlib.Path(__file__).resolve().parents[2] / "experiments"


def load_all(papers: pathlib.Path) -> dict[str, Table]:
    """Reads every table of a folder of papers.

    Raises:
      UserError: the folder has no papers, or a file has a mistake; the message names file and key.
    """
    found: dict[str, Table] = {}
    for file in sorted(papers.glob(f"*/{_PAPER_FILE}")):
        paper = _paper(file)
        for path in sorted(file.parent.glob("*.toml")):
            if path.name != _PAPER_FILE:
                table = _table(path, paper)
                found[table.key] = table
    if not found:
        raise UserError(
            f"--papers {papers} has no tables; give a folder with one folder for each paper, in it "
            f"{_PAPER_FILE} and a .toml file for each table"
        )
    return found


def choose(tables: Mapping[str, Table], names: Iterable[str]) -> list[Table]:
    """Returns the tables of some names: 'lamb/mnist', or 'lamb' for all tables of a paper.

    Raises:
      UserError: there is no such table; the message lists the known ones.
    """
    chosen: dict[str, Table] = {}
    for name in names:
        fits = {
            key: table for key, table in tables.items() if name in (key, table.paper.key)
        }
        if not fits:
            raise UserError(f"there is no table {name!r}; known: {', '.join(tables)}")
        chosen |= fits
    return list(chosen.values())


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
            raise self.error(
                f"{self._name(key)} is {value!r}; it must be of type {kind.__name__}"
            )
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
    paper = Paper(
        path.parent.name, section.take("title", str), section.take("arxiv", str, ""),
        section.take("about", str, ""),
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
    if any(bool(cell.row) != bool(cell.column) for cell in cells.values()) or (
        len({bool(cell.row) for cell in cells.values()}) > 1
    ):
        raise section.error("all cells must have a row and a column, or none")
    table = Table(
        f"{paper.key}/{path.stem}", path, paper, section.take("title", str),
        section.take("source", str, ""), section.take("about", str, ""),
        {name: scales[name] for name in SCALES if name in scales}, cells,
        None if tuning.is_empty() else _tuning(tuning),
    )
    section.end()
    return table


def _metric(section: _Section) -> Metric:
    metric = Metric(
        section.take("key", str), section.take("label", str), section.take("digits", int, 4),
        section.choice("better", ("higher", "lower"), "higher"), section.take("factor", float, 1.0),
    )
    section.end()
    return metric


def _scale(section: _Section, name: str, metric: Metric) -> Scale:
    stages = section.take("stages", list, [])
    config = section.take("config", str, "")
    if bool(stages) == bool(config) or not all(isinstance(stage, str) for stage in stages):
        raise section.error(
            f"scales.{name} must have either config, a recipe such as 'mnist_lenet:batch=4096', or "
            "stages, a list of recipes"
        )
    stages = stages or [config]
    own = section.take("metric", dict, {})
    data = section.take("data", list, [""] * len(stages))
    if len(data) != len(stages) or not all(isinstance(item, str) for item in data):
        raise section.error(
            f"scales.{name}.data is {data!r}; give a list of one folder for each of the "
            f"{len(stages)} stages, '' for a stage without"
        )
    scale = Scale(
        name, tuple(stages),
        _metric(_Section(section.path, own, f"scales.{name}.metric")) if own else metric,
        _dotted(section.take("overrides", dict, {})), section.take("seeds", int, 1),
        section.take("about", str, ""), tuple(data), section.take("hardware", str, ""),
    )
    if scale.seeds < 1:
        raise section.error(f"scales.{name}.seeds is {scale.seeds}; it must be at least 1")
    section.end()
    return scale


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
        name, section.take("argument", str, ""), _dotted(section.take("overrides", dict, {})),
        _dotted(section.take("first", dict, {})), dict(published),
        section.choice("known", ("seen", "recalled"), known) if published else "",
        tuple(section.take("only", list, [])),
        {scale: _dotted(values) for scale, values in section.section("at").items()},
        section.take("unknown", str, ""), section.take("tuned_by", str, ""),
        _dotted(section.take("search", dict, {})),
        section.take("row", str, ""), section.take("column", str, ""),
    )
    if cell.first and any(len(scale.stages) < 2 for scale in scales.values()):
        raise section.error(
            f"cell {name} has keys of the first of several stages, and a scale has only one stage; "
            "give them as overrides"
        )
    for scale in (*cell.only, *cell.at):
        if scale not in scales:
            raise section.error(
                f"cell {name} names the scale {scale!r}; the table has: {', '.join(scales)}"
            )
    section.end()
    return cell


def _tuning(section: _Section) -> Tuning:
    factors = section.take("factors", list)
    if not factors or not all(type(x) in (int, float) and x > 0 for x in factors):
        raise section.error(f"tuning.factors is {factors!r}; give numbers above 0")
    tuning = Tuning(
        section.take("key", str), tuple(map(float, factors)),
        _dotted(section.take("overrides", dict, {})), section.take("seeds", int, 1),
    )
    section.end()
    return tuning


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {'optimizer.b2': 0.98} for {'optimizer': {'b2': 0.98}}, and what is so already."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {
            prefix + key: value
        }
    return found
