"""Compares runs: configs, metrics and times in a table, curves in a figure."""

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lamb_tpu import cli, terminal
from lamb_tpu.errors import UserError

if TYPE_CHECKING:  # --help does not need these imports
    from matplotlib.figure import Figure

    from lamb_tpu.store.runs import RunFiles

_EXAMPLES = """\
examples:
  python -m lamb_tpu.compare runs/digits runs/adamw
  python -m lamb_tpu.compare runs/rates/sweep/* --metric=loss
  python -m lamb_tpu.compare runs/digits gs://BUCKET/adamw --against=updates
  python -m lamb_tpu.compare runs/digits --metric=noise_scale

Unfinished runs are compared by their records so far. Keys that change no
result, such as log.every, are omitted. A metric of the training records, such
as noise_scale, is drawn beside the batch size. With more than 8 runs, the
figure names the 8 best runs and draws the other runs in grey.
"""
_MAX_COLUMNS = 5  # config keys in the main table; if more keys differ, they get a second table
_AXES = {"epochs": "epochs", "updates": "completed updates", "examples": "examples seen"}
_LARGEST = 1e100  # largest value that is drawn
_MAX_NAMED = 8  # runs that get a name and a style; equals `style.MOST`
_MAX_LENGTH = 24  # characters of a value in the table


class Run(NamedTuple):
    """A run to compare, with the records of its training and evaluations.

    `name` is the path of the run's folder, without the parent folders that all runs share.
    """

    name: str
    files: "RunFiles"
    trained: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    def points(self, metric: str) -> list[tuple[Mapping[str, Any], float]]:
        """Returns pairs (evaluation, value) for the evaluations with a finite value of a metric."""
        return [(r, r[metric]) for r in self.evaluations if isinstance(r.get(metric), float)]

    def position(self, record: Mapping[str, Any], against: str) -> float:
        """Returns a record's position on an axis of 'epochs', 'updates' or 'examples'."""
        if against == "examples":
            from lamb_tpu.store import runs

            return runs.examples_at(record, self.trained, self.files.config["batch_size"])
        return record[{"epochs": "epoch", "updates": "step"}[against]]

    def curve(self, metric: str, against: str) -> list[tuple[float, float]]:
        """Returns pairs (position, value) for the training records whose value can be drawn."""
        return [
            (self.position(record, against), record[metric])
            for record in self.trained
            if _is_drawn(record.get(metric))
        ]


def read(paths: Sequence[str]) -> list[Run]:
    """Reads the folders of runs; rejects a folder that holds no run or that is given twice."""
    from lamb_tpu.store import runs

    files = [runs.read(path, "RUN") for path in paths]
    folders = [run.folder.path for run in files]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(
                f"RUN {folder}", ..., f"is given {folders.count(folder)} times", "give it once"
            )
    # os.path.commonpath would treat gs:// as a relative path.
    shared = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*(folder.parent.parts for folder in folders))
    )
    above = len(list(shared))
    return [
        Run(
            "/".join(folder.parts[above:]),
            run,
            run.records("train", ["epoch", "seconds"]),
            run.records("eval", ["epoch"]),
        )
        for folder, run in zip(folders, files)
    ]


def choose_metric(
    runs: Sequence[Run], metric: str | None = None, better: str | None = None
) -> tuple[str, str] | None:
    """Returns the metric to compare, and whether 'higher' or 'lower' values of it are better.

    Returns None if no run has an evaluation.
    """
    from lamb_tpu.run import metric as metric_lib

    names = [
        set(run.evaluations[-1]) - {"step", "kind", "epoch"} for run in runs if run.evaluations
    ]
    if not names:
        if metric is not None:
            raise UserError(
                "--metric", metric, "is given, but no run has an evaluation yet", "omit the flag"
            )
        return None
    shared = set.intersection(*names)
    if not shared:
        raise UserError(
            "RUN",
            problem=": the evaluations of the runs have no metric in common",
            remedy="compare runs of the same task",
        )
    try:
        return metric_lib.choose(runs[0].files.config, shared, metric, better)
    except UserError as error:
        recorded = _of_training(runs)
        if not recorded:
            raise
        more = f"or a metric of the training records: {', '.join(recorded)}"
        remedy = f"{error.remedy}; {more}" if error.remedy else more
        raise UserError(error.key, error.value, error.problem, remedy) from None


def _of_training(runs: Sequence[Run]) -> list[str]:
    """Returns the metrics that are in the training records of every run, but in no evaluation."""
    numbers = {
        key
        for record in runs[0].trained
        for key, value in record.items()
        if isinstance(value, float)
    }
    return sorted(name for name in numbers if is_recorded(runs, name))


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the config keys that differ, with each run's value as text.

    A missing key has its default value, or '-' if the key has no default.
    """
    from lamb_tpu.config import FREE_KEYS

    keys = sorted({key for run in runs for key in run.files.config})
    values = {
        key: [_value(run.files.config, key) for run in runs]
        for key in keys
        if not key.startswith(FREE_KEYS)
    }
    return {
        key: list(map(_text, each))
        for key, each in values.items()
        if any(value != each[0] for value in each)
    }


def _value(config: Mapping[str, Any], key: str) -> Any:
    from lamb_tpu import overrides

    if key in config:
        return config[key]
    for section in overrides.SECTIONS:
        if key.startswith(f"{section}."):
            defaults = overrides.defaults_of_stored(section, config)
            default = defaults.get(key.removeprefix(f"{section}."), "-")
            return list(default) if isinstance(default, tuple) else default  # JSON has lists
    return "-"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4e}"


def _text(value: Any) -> str:
    # JSON has turned tuples into lists.
    text = str(tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def tables(runs: Sequence[Run], metric: tuple[str, str] | None) -> list[list[list[str]]]:
    """Returns one or two tables as rows of texts.

    The first table has a row for each run. If more than `_MAX_COLUMNS` config keys differ, the second
    table has a row for each of these keys.
    """
    from lamb_tpu.watch.progress import format_seconds

    keys = differing(runs)
    key, better = metric or ("metric", "higher")
    wide = len(keys) > _MAX_COLUMNS
    heads = [] if wide else [_short(name, keys) for name in keys]
    rows = [["run", *heads, f"best {key}", "at epoch", "last", "updates", "time", "device", ""]]
    for number, run in enumerate(runs):
        points, receipt = run.points(key), run.files.receipt()
        best: Callable[..., tuple[Mapping[str, Any], float]] = max if better == "higher" else min
        at, value = best(points, key=lambda point: point[1]) if points else ({}, None)
        last = run.trained[-1] if run.trained else {}
        rows.append(
            [
                run.name,
                *([] if wide else [texts[number] for texts in keys.values()]),
                "" if value is None else _number(value),
                f"{at['epoch']:.4g}" if at else "",
                _number(points[-1][1]) if points else "",
                f"{last['step']:,}" if last else "0",
                format_seconds(last["seconds"]) if last else "",
                f"{receipt['devices']} x {receipt['device']}" if receipt else "",
                run.files.unfinished(),
            ]
        )
    if not wide:
        return [rows]
    return [
        rows,
        [
            ["config", *(run.name for run in runs)],
            *([name, *texts] for name, texts in keys.items()),
        ],
    ]


def _short(key: str, keys: Mapping[str, Any]) -> str:
    """Returns the last part of a key, or the full key if that part is not unique or is 'name'."""
    last = key.rpartition(".")[2]
    alike = [other for other in keys if other.rpartition(".")[2] == last]
    return key if last == "name" or len(alike) > 1 else last


def is_recorded(runs: Sequence[Run], metric: str | None) -> bool:
    """Returns whether a metric is in every run's training records, and in no evaluation."""
    return not any(metric in record for run in runs for record in run.evaluations) and all(
        any(metric in record for record in run.trained) for run in runs
    )


def history(runs: Sequence[Run], metric: str, against: str) -> "Figure":
    """Plots a recorded metric (see `is_recorded`) and the batch size of every run, side by side."""
    from lamb_tpu import style

    figure = style.figure(10.4, 4.4)
    left, right = figure.subplots(1, 2)
    looks = _looks(runs, None)
    for run, look in zip(runs, looks):
        points = run.curve(metric, against)
        style_of = {key: value for key, value in look.items() if key != "marker"}
        left.plot(*_columns(points), **style_of, marker="o" if len(points) == 1 else None)
        sizes = [
            (
                run.position(record, against),
                record.get("batch_size", run.files.config["batch_size"]),
            )
            for record in run.trained
        ]
        right.plot(*_columns(sizes), **style_of | {"label": None}, drawstyle="steps-pre")
    style.dress(left, metric, _AXES[against], metric)
    style.dress(right, "batch size", _AXES[against], "batch size (examples)")
    if all((line.get_ydata() > 0).all() for line in left.lines):
        style.log_axis(left)
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:,g}")
    style.legend_below(figure)
    return figure


def _looks(runs: Sequence[Run], metric: tuple[str, str] | None) -> list[dict[str, Any]]:
    """Returns each run's arguments of `Axes.plot`; only the best `_MAX_NAMED` runs are not grey."""
    from lamb_tpu import style

    numbers = list(range(len(runs)))
    named = numbers
    if len(runs) > _MAX_NAMED:

        def rank(number: int) -> float:
            values = [value for _, value in runs[number].points(metric[0])] if metric else []
            if metric is None or not values:
                return math.inf
            return -max(values) if metric[1] == "higher" else min(values)

        named = sorted(numbers, key=rank)[:_MAX_NAMED]
    looks: list[dict[str, Any]] = [
        {"color": "0.75", "linewidth": 0.6, "zorder": 1, "label": None, "marker": None}
        for _ in runs
    ]
    for order, number in enumerate(named):
        look = style.numbered(order)
        looks[number] = {**look, "linewidth": 1.2, "zorder": 2, "label": runs[number].name}
    if others := [number for number in numbers if number not in named]:
        looks[others[-1]]["label"] = f"{len(others)} other runs"
    return looks


def _is_drawn(value: Any) -> bool:
    """Returns whether a value is small enough that the range of an axis cannot overflow."""
    return isinstance(value, float) and abs(value) <= _LARGEST


def _columns(points: Sequence[tuple[float, float]]) -> Any:
    import numpy as np

    return np.array(points, np.float64).reshape(-1, 2).T


def draw(runs: Sequence[Run], metric: tuple[str, str] | None, against: str) -> "Figure":
    """Plots every run's training loss and evaluation metric.

    `metric` comes from `choose_metric`; `against` is a key of `_AXES`.
    """
    from lamb_tpu import style

    figure = style.figure(5.2 * (2 if metric else 1), 4.4)
    panels = figure.subplots(1, 2 if metric else 1, squeeze=False)[0]
    for run, look in zip(runs, _looks(runs, metric)):
        curves = [run.curve("loss", against)]
        if metric:
            evaluated = [(r, value) for r, value in run.points(metric[0]) if _is_drawn(value)]
            curves.append([(run.position(record, against), value) for record, value in evaluated])
        for axes, points in zip(panels, curves):
            look_here = look | ({} if axes is panels[0] else {"label": None})
            every = max(1, len(points) // 12)
            axes.plot(*_columns(points), **look_here, markersize=3, markevery=every)
    label = _AXES[against]
    style.dress(panels[0], "training loss", label, "loss", "lower")
    drawn = [y for line in panels[0].lines for y in line.get_ydata()]
    if drawn and min(drawn) > 0:
        style.log_axis(panels[0])
    if metric:
        style.dress(panels[1], metric[0], label, metric[0], metric[1])
    style.legend_below(figure)
    return figure


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.compare", epilog=_EXAMPLES, description=__doc__ or ""
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    output = "figure of the curves (default: %(default)s)"
    parser.option("--output=FILE.png", output, default="compare.png")
    parser.option(
        "--metric=NAME",
        "metric of the evaluation (default: the metric of config.checkpoint.best or config.target, or "
        "the task's main metric), or of the training records",
    )
    better = "default: lower for a loss or an error, else higher"
    parser.option("--better", better, choices=("higher", "lower"))
    against = (
        "quantity on the x axis (default: epochs; examples for a metric of the training records)"
    )
    parser.option("--against", against, choices=tuple(_AXES))
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    """Prints the tables and draws the figure."""
    from lamb_tpu import style
    from lamb_tpu.files import writing

    path = style.figure_path(options.output, "--output")
    runs = read(options.runs)
    of_training = is_recorded(runs, options.metric)
    metric = choose_metric(runs, None if of_training else options.metric, options.better)
    for table in tables(runs, metric):
        print(terminal.columns(table), end="\n\n")
    if of_training:
        figure = history(runs, options.metric, options.against or "examples")
    else:
        figure = draw(runs, metric, options.against or "epochs")
    writing.replace(path, style.png(figure), "--output")
    print(path)


if __name__ == "__main__":
    cli.run_command(lambda words: main(_parse(words)))
