"""Sweeps: a search over config keys, represented as a table in memory.

Each trial is a cell of the table, so the code that runs, resumes and records cells handles trials too.
"""

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from lamb_tpu import field_types, limits, overrides
from lamb_tpu.config import recipe_path
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import jobs, search
from lamb_tpu.reproduce.jobs import JobStage
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.search import Choice, Dimension, Range
from lamb_tpu.reproduce.summary import summaries
from lamb_tpu.reproduce.tables import Better, Cell, Metric, Paper, Scale, Table
from lamb_tpu.run import metric as metric_lib
from lamb_tpu.run import phases
from lamb_tpu.run.build import prepare
from lamb_tpu.run.evaluator import metric_names
from lamb_tpu.run.settings import settings
from lamb_tpu.spec import Spec, as_dict, flatten

NAME = "sweep"  # name of the table, its scale and its files


class Sweep(NamedTuple):
    """A search: the table of its trials, and the dimensions of the search."""

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
    config: Spec, searches: Sequence[str], trials: int | None, seed: int
) -> tuple[list[Dimension], list[dict[str, Any]]]:
    """Returns the dimensions of a search, in the syntax of `search.parse`, and its points.

    If every dimension is a list and `trials` is None, the points are the full grid. They map keys to values.
    """
    dimensions = [_typed(config, search.parse(text)) for text in searches]
    keys = [dimension.key for dimension in dimensions]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(
                f"--search={key}", ..., f"is given {keys.count(key)} times", "give it once"
            )
    if trials is not None:
        return dimensions, search.halton_points(dimensions, trials, seed)
    choices = [dimension for dimension in dimensions if isinstance(dimension, Choice)]
    if len(choices) < len(dimensions):
        ranges = ", ".join(d.key for d in dimensions if isinstance(d, Range))
        raise UserError(
            "--trials",
            problem=f"is missing, but must be given to search a range ({ranges})",
            remedy="give --trials=N",
        )
    count = math.prod(len(choice.values) for choice in choices)
    if count > limits.MAX_TRIALS:
        raise UserError(
            "--search",
            problem=f"asks for a grid of {count:,} trials: {len(choices)} list(s) of up to "
            f"{max(len(choice.values) for choice in choices):,} values",
            remedy=f"use at most {limits.MAX_TRIALS:,} trials: shorten the lists, or give --trials "
            "and ranges",
        )
    return dimensions, search.grid(choices)


def _typed(config: Spec, dimension: Dimension) -> Dimension:
    """Converts the values of a dimension to the type of its config key."""
    key = dimension.key
    value_type = overrides.kind_of(as_dict(config), key)
    if isinstance(dimension, Choice):
        values = [
            field_types.convert(f"config.{key}", text, value_type) for text in dimension.values
        ]
        return dimension._replace(values=tuple(values))
    if not _takes("1", value_type):
        value = flatten(config).get(key)
        raise UserError(
            f"--search={key}",
            problem=f"is a range, but config.{key} takes no numbers"
            + (f", only values such as {value!r}" if value is not None else ""),
            remedy="list its values, separated by commas",
        )
    return dimension._replace(integers=not _takes("0.5", value_type))


def _takes(number: str, value_type: Any) -> bool:
    try:
        return type(field_types.convert("", number, value_type)) in (int, float)
    except UserError:
        return False


def make(
    recipe: str,
    config: Spec,
    dimensions: Sequence[Dimension],
    values: Sequence[Mapping[str, Any]],
    folder: pathlib.Path,
    seeds: int = 1,
    metric: str | None = None,
    better: str | None = None,
) -> Sweep:
    """Creates the table of a sweep, with a trial for each of `values`, and checks every trial.

    Checks that need the data run once for each value of a list. For `metric` and `better`, see
    `metric.choose`.
    """
    changed = _changed(recipe, config)
    for dimension in dimensions:
        if dimension.key in changed or dimension.key == "seed":
            reason = "set by --seeds" if dimension.key == "seed" else "also set by --config"
            raise UserError(
                f"--search={dimension.key}", problem=f"is {reason}", remedy="leave one of them out"
            )
    if "seed" in changed:
        raise UserError(
            "--config.seed", ..., "is set for each run of a sweep", "give --seeds=N instead"
        )
    configs = _configs(JobStage(recipe, changed), values)
    names = _prepare(configs, values, [d.key for d in dimensions if isinstance(d, Choice)])
    key, better = metric_lib.choose(flatten(config), names, metric, better)
    metric_of_trials = Metric(key, key, better=cast(Better, better))
    table = Table(
        key=NAME,
        path=folder / f"{NAME}.toml",
        paper=Paper(NAME, NAME),
        title=f"Sweep of {recipe}",
        scales={NAME: Scale(NAME, (recipe,), metric_of_trials, changed, seeds)},
        cells={_name(n): Cell(_name(n), overrides=point) for n, point in enumerate(values)},
    )
    return Sweep(table, dimensions)


def short_recipe(recipe: str) -> str:
    """Returns a recipe in which the path of a shipped file is replaced by the file's name."""
    path, colon, argument = recipe.partition(":")
    name = pathlib.Path(path).stem
    return f"{name if recipe_path(name) == path else path}{colon}{argument}"


def _name(number: int) -> str:
    return f"trial-{number:03}"


def _changed(recipe: str, config: Spec) -> dict[str, Any]:
    before, now = flatten(overrides.load(recipe)), flatten(config)
    for key in sorted(before.keys() - now.keys()):
        raise UserError(
            f"--config.{key.rpartition('.')[0]}",
            problem=f"leaves out {key}",
            remedy=f"give single keys, such as --config.{key}=VALUE",
        )
    return {
        key: value
        for key, value in now.items()
        if key not in before or (type(value), value) != (type(before[key]), before[key])
    }


def _configs(stage: JobStage, values: Sequence[Mapping[str, Any]]) -> list[Spec]:
    """Returns the config of every trial, after all checks that need no data."""
    configs: list[Spec] = []
    first_trials: dict[str, int] = {}
    for number, point in enumerate(values):
        with _naming(number, point):
            config = JobStage(stage.recipe, {**stage.overrides, **point}).config()
            for phase in phases.split(config):
                settings(phase.config)
        other = first_trials.setdefault(jobs.config_hash(jobs.flat_configs([config])), number)
        if other != number:
            differing = [key for key in point if point[key] != values[other][key]]
            raise UserError(
                f"--search={', '.join(differing)}",
                problem=f"changes no result: {_name(other)} and {_name(number)} are the same run",
                remedy="search another key",
            )
        configs.append(config)
    return configs


def _prepare(
    configs: Sequence[Spec], values: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> list[str]:
    """Builds the first trial, and the first trial with each value of `keys`; returns the metric names."""
    seen: set[tuple[str, str]] = set()
    names: list[str] = []
    for number, (config, point) in enumerate(zip(configs, values)):
        new = {(key, repr(point[key])) for key in keys} - seen
        seen |= new
        if new or not names:
            with _naming(number, point):
                # The later phases need the weights of the first phase, and have the same task.
                run = prepare(phases.split(config)[0].config, None)
            names = names or metric_names(run)
    return names


@contextlib.contextmanager
def _naming(number: int, point: Mapping[str, Any]) -> Iterator[None]:
    """Adds the name of the trial to a UserError of the block."""
    try:
        yield
    except UserError as error:
        text = ", ".join(f"{key}={value}" for key, value in point.items())
        raise error.at(f"{_name(number)} ({text})") from None


def check_records(sweep: Sweep, results: Results) -> None:
    """Rejects a folder with damaged records or records of another sweep, because they would be lost."""
    folder = sweep.table.path.parent
    results.check()
    for summary in summaries(sweep.table, sweep.scale, results):
        if summary.stale:
            raise UserError(
                f"--workdir {folder}",
                problem=f"holds another sweep ({summary.cell.name}: "
                f"{'; '.join(summary.changes[:4])})",
                remedy="give another folder, or the same --config and --search",
            )
