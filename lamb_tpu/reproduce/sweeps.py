"""Sweeps: a search over keys of any config, as a table that is made in memory.

A trial is a cell of the table, so it is run, resumed and recorded as every other cell.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from lamb_tpu import cli
from lamb_tpu.config import flatten, recipe_path
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import jobs, search
from lamb_tpu.reproduce.jobs import Stage
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.search import Choice, Dimension, Range
from lamb_tpu.reproduce.summary import summaries
from lamb_tpu.reproduce.tables import Cell, Metric, Paper, Scale, Table
from lamb_tpu.run import metric as metric_lib
from lamb_tpu.run import overrides, phases
from lamb_tpu.run.build import prepare, settings
from lamb_tpu.run.evaluator import metric_names

NAME = "sweep"  # of the table, its scale and its files


class Sweep(NamedTuple):
    """A search: the table of its trials, and the dimensions that they vary."""

    table: Table
    dimensions: Sequence[Dimension]

    @property
    def scale(self) -> Scale:
        """The only scale of the table."""
        return self.table.scales[NAME]

    @property
    def cells(self) -> list[Cell]:
        """The trials."""
        return list(self.table.cells.values())


def points(
    config: ConfigDict, searches: Sequence[str], trials: int | None, seed: int
) -> tuple[list[Dimension], list[dict[str, Any]]]:
    """Returns the dimensions of a search and its points, as values by key.

    Args:
      config: the config that the search changes.
      searches: dimensions as `search.parse` takes them.
      trials: number of points; None: the whole grid, where all dimensions are lists.
      seed: of the quasi-random points.

    Raises:
      UserError: a dimension is wrong, or a number of trials is needed.
    """
    dimensions = [_typed(config, search.parse(text)) for text in searches]
    keys = [dimension.key for dimension in dimensions]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--search={key} is given {keys.count(key)} times; give it once")
    if trials is not None:
        return dimensions, search.halton_points(dimensions, trials, seed)
    choices = [dimension for dimension in dimensions if isinstance(dimension, Choice)]
    if len(choices) < len(dimensions):
        ranges = ", ".join(d.key for d in dimensions if isinstance(d, Range))
        raise UserError(
            f"--trials is missing; only a search of lists has an end, and {ranges} is a range"
        )
    return dimensions, search.grid(choices)


def _typed(config: ConfigDict, dimension: Dimension) -> Dimension:
    """Returns a dimension whose values have the type of its key."""
    key = dimension.key
    kind = overrides.kind_of(config, key)
    if isinstance(dimension, Choice):
        values = [overrides.convert(f"config.{key}", text, kind) for text in dimension.values]
        return dimension._replace(values=tuple(values))
    if not _takes("1", kind):
        value = flatten(config).get(key)
        raise UserError(
            f"--search={key} is a range, and config.{key} takes no numbers"
            + (f" but values such as {value!r}" if value is not None else "")
            + "; list its values, separated by commas"
        )
    return dimension._replace(whole=not _takes("0.5", kind))


def _takes(number: str, kind: Any) -> bool:
    try:
        return type(overrides.convert("", number, kind)) in (int, float)
    except UserError:
        return False


def make(
    recipe: str,
    config: ConfigDict,
    dimensions: Sequence[Dimension],
    values: Sequence[Mapping[str, Any]],
    folder: pathlib.Path,
    seeds: int = 1,
    metric: str | None = None,
    better: str | None = None,
) -> Sweep:
    """Makes the table of a sweep and checks every trial.

    The checks that need the data are made once for each value of a list.

    Args:
      recipe: as --config takes it.
      config: the recipe's config with the overrides of all trials.
      dimensions: see `points`.
      values: the points, each a trial.
      folder: where the records lie.
      seeds: number of runs of each trial.
      metric, better: see `metric.choose`.

    Raises:
      UserError: a trial's config or the data has a mistake, two trials are the same, or there is no
        such metric.
    """
    changed = _changed(recipe, config)
    for dimension in dimensions:
        if dimension.key in changed or dimension.key == "seed":
            own = "set by --seeds" if dimension.key == "seed" else "also given as --config."
            raise UserError(f"--search={dimension.key} is {own}; leave one of them out")
    if "seed" in changed:
        raise UserError("--config.seed is set for each run of a sweep; give --seeds=N instead")
    configs = _configs(Stage(recipe, changed), values)
    names = _prepare(configs, values, [d.key for d in dimensions if isinstance(d, Choice)])
    key, better = metric_lib.choose(flatten(config), names, metric, better)
    table = Table(
        NAME,
        folder / f"{NAME}.toml",
        Paper(NAME, NAME),
        f"Sweep of {recipe}",
        "",
        "",
        {NAME: Scale(NAME, (recipe,), Metric(key, key, better=better), changed, seeds)},
        {
            name: Cell(name, overrides=point)
            for name, point in zip(map(_name, range(len(values))), values)
        },
    )
    return Sweep(table, dimensions)


def short_recipe(recipe: str) -> str:
    """Returns a recipe with the name of a shipped file in place of its path."""
    path, colon, argument = recipe.partition(":")
    name = pathlib.Path(path).stem
    return f"{name if recipe_path(name) == path else path}{colon}{argument}"


def _name(number: int) -> str:
    return f"trial-{number:03}"


def _changed(recipe: str, config: ConfigDict) -> dict[str, Any]:
    """Returns the keys in which a config differs from its recipe."""
    before, now = flatten(cli.load_recipe(recipe)), flatten(config)
    for key in sorted(before.keys() - now.keys()):
        raise UserError(
            f"--config.{key.rpartition('.')[0]} leaves out {key}; a sweep takes single keys, such "
            f"as --config.{key}=VALUE"
        )
    return {
        key: value
        for key, value in now.items()
        if key not in before or (type(value), value) != (type(before[key]), before[key])
    }


def _configs(stage: Stage, values: Sequence[Mapping[str, Any]]) -> list[ConfigDict]:
    """Returns the config of every trial, after all checks that need no data.

    Raises:
      UserError: a trial cannot run, or its config is another's.
    """
    found: list[ConfigDict] = []
    known: dict[str, int] = {}
    for number, point in enumerate(values):
        with _naming(number, point):
            config = Stage(stage.recipe, {**stage.overrides, **point}).config()
            for phase in phases.split(config):
                settings(phase.config)
        other = known.setdefault(jobs.config_hash(jobs.flat_configs([config])), number)
        if other != number:
            differ = [key for key in point if point[key] != values[other][key]]
            raise UserError(
                f"{_name(other)} and {_name(number)} are the same run, because --search="
                f"{', '.join(differ)} changes no result; search another key"
            )
        found.append(config)
    return found


def _prepare(
    configs: Sequence[ConfigDict], values: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> list[str]:
    """Builds the first trial, and the first with each value of `keys`; returns its metrics."""
    seen: set[tuple[str, str]] = set()
    names: list[str] = []
    for number, (config, point) in enumerate(zip(configs, values)):
        new = {(key, repr(point[key])) for key in keys} - seen
        seen |= new
        if new or not names:
            with _naming(number, point):
                # Later phases need the weights of the first, and have its task.
                run = prepare(phases.split(config)[0].config, None)
            names = names or metric_names(run)
    return names


@contextlib.contextmanager
def _naming(number: int, point: Mapping[str, Any]) -> Iterator[None]:
    """Names the trial in a UserError of the block."""
    try:
        yield
    except UserError as error:
        text = ", ".join(f"{key}={value}" for key, value in point.items())
        raise UserError(f"{_name(number)} ({text}): {error}") from None


def check_records(sweep: Sweep) -> None:
    """Refuses a folder that has records of another sweep, which would be lost.

    Raises:
      UserError: a record's config is not its trial's; the message says what differs.
    """
    folder = sweep.table.path.parent
    for summary in summaries(sweep.table, sweep.scale, Results(sweep.table)):
        if summary.stale[0]:
            raise UserError(
                f"--workdir {folder} holds another sweep ({summary.cell.name}: "
                f"{'; '.join(summary.stale[1][:4])}); give another folder, or the same --config "
                "and --search"
            )
