"""Compares runs: configs, metrics and time in a table, curves in a picture."""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lamb_tpu import cli, terminal
from lamb_tpu.errors import UserError

if TYPE_CHECKING:  # --help does without what these import
    from matplotlib.figure import Figure

    from lamb_tpu.store.runs import RunFiles

_EXAMPLES = """\
examples:
  python -m lamb_tpu.compare runs/digits runs/adamw
  python -m lamb_tpu.compare runs/rates/sweep/* --metric=loss --output=losses.png
  python -m lamb_tpu.compare runs/digits gs://BUCKET/adamw --against=updates
  python -m lamb_tpu.compare runs/digits --metric=noise_scale

A run that goes on, or was broken off, is compared as far as it is. Keys that
change no result, such as log.every, are left out. A metric of the training
records, such as noise_scale, is drawn beside the batch size.
"""
_MAX_COLUMNS = 5  # of keys that differ; with more, these have a table of their own
_AXES = {"epochs": "epochs", "updates": "completed updates", "examples": "examples seen"}
_MAX_LENGTH = 24  # of a value, beyond which it is cut


class Run(NamedTuple):
    """A run to compare.

    Attributes:
      name: the part of its path that tells it from the others.
      files: its folder and config.
      trained, evaluations: its records.
    """

    name: str
    files: "RunFiles"
    trained: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    def points(self, metric: str) -> list[tuple[Mapping[str, Any], float]]:
        """Returns the evaluations at which a metric was finite, with its values."""
        return [(r, r[metric]) for r in self.evaluations if isinstance(r.get(metric), float)]

    def place(self, record: Mapping[str, Any], against: str) -> float:
        """Returns a record's place on an axis of 'epochs', 'updates' or 'examples'."""
        if against == "examples":  # a record has them where the batch changes
            return record.get("examples", record["step"] * self.files.config["batch_size"])
        return record[{"epochs": "epoch", "updates": "step"}[against]]


def read(paths: Sequence[str]) -> list[Run]:
    """Reads the folders of runs.

    Raises:
      UserError: a folder holds no run, or is given twice.
    """
    from lamb_tpu.store import runs

    found = [runs.read(path, "RUN") for path in paths]
    folders = [run.folder.path for run in found]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"RUN {folder} is given {folders.count(folder)} times; give it once")
    # os.path.commonpath would take gs:// for a relative path.
    shared = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*(folder.parent.parts for folder in folders))
    )
    above = len(list(shared))
    return [
        Run("/".join(folder.parts[above:]), run, run.records("train"), run.records("eval"))
        for folder, run in zip(folders, found)
    ]


def choose_metric(
    found: Sequence[Run], metric: str | None = None, better: str | None = None
) -> tuple[str, str] | None:
    """Returns the metric to compare and 'higher' or 'lower'; None if no run has an evaluation.

    Raises:
      UserError: not all evaluations have such a metric.
    """
    from lamb_tpu.run import metric as metric_lib

    names = [
        set(run.evaluations[-1]) - {"step", "kind", "epoch"} for run in found if run.evaluations
    ]
    if not names:
        if metric is not None:
            raise UserError(f"--metric is {metric!r}, and no run has an evaluation yet")
        return None
    shared = set.intersection(*names)
    if not shared:
        raise UserError("RUN: the runs have no metric of their evaluations in common")
    try:
        return metric_lib.choose(found[0].files.config, shared, metric, better)
    except UserError as error:
        recorded = _of_training(found)
        if not recorded:
            raise
        raise UserError(f"{error}; those of the training records: {', '.join(recorded)}") from None


def _of_training(found: Sequence[Run]) -> list[str]:
    """Returns the metrics that only training records have, those of every run, sorted."""
    names = set.intersection(
        *(
            {
                key
                for record in run.trained
                for key, value in record.items()
                if isinstance(value, float)
            }
            for run in found
        )
    )
    return sorted(name for name in names if is_recorded(found, name))


def differing(found: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the keys that differ between the configs, with each run's value as text.

    A key that a config leaves at its default has that value, and '-' if it has no such key.
    """
    from lamb_tpu.config import FREE_KEYS

    keys = sorted({key for run in found for key in run.files.config})
    values = {
        key: [_value(run.files.config, key) for run in found]
        for key in keys
        if not key.startswith(FREE_KEYS)
    }
    return {
        key: list(map(_text, each))
        for key, each in values.items()
        if any(value != each[0] for value in each)
    }


def _value(config: Mapping[str, Any], key: str) -> Any:
    from lamb_tpu.run import overrides

    if key in config:
        return config[key]
    for section in overrides.SECTIONS:
        if key.startswith(f"{section}."):
            start = len(section) + 1
            fields = {k[start:]: v for k, v in config.items() if k.startswith(f"{section}.")}
            of_data = section == "data.options"
            name = config["data.name"] if of_data else overrides.name_of(section, fields)
            try:
                default = overrides.defaults(section, fields, name).get(key[start:], "-")
                return list(default) if isinstance(default, tuple) else default  # as in JSON
            except UserError:  # a user's own part that is not here
                return "-"
    return "-"


def _text(value: Any) -> str:
    # JSON has made lists of tuples.
    text = str(tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def tables(found: Sequence[Run], metric: tuple[str, str] | None) -> list[list[list[str]]]:
    """Returns one table as rows of texts, or two if many keys of the configs differ.

    The first has a row for each run, the second a row for each key.
    """
    from lamb_tpu.watch.progress import format_seconds

    keys = differing(found)
    key, better = metric or ("metric", "higher")
    wide = len(keys) > _MAX_COLUMNS
    heads = [] if wide else [_short(name, keys) for name in keys]
    rows = [["run", *heads, f"best {key}", "at epoch", "last", "updates", "time", "device", ""]]
    for number, run in enumerate(found):
        points, receipt = run.points(key), run.files.receipt()
        best: Callable[..., tuple[Mapping[str, Any], float]] = max if better == "higher" else min
        at, value = best(points, key=lambda point: point[1]) if points else ({}, None)
        last = run.trained[-1] if run.trained else {}
        rows.append(
            [
                run.name,
                *([] if wide else [texts[number] for texts in keys.values()]),
                "" if value is None else f"{value:.4f}",
                f"{at['epoch']:.4g}" if at else "",
                f"{points[-1][1]:.4f}" if points else "",
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
            ["config", *(run.name for run in found)],
            *([name, *texts] for name, texts in keys.items()),
        ],
    ]


def _short(key: str, keys: Mapping[str, Any]) -> str:
    """Returns a key without its section, if that tells it from the others and says enough."""
    last = key.rpartition(".")[2]
    alike = [other for other in keys if other.rpartition(".")[2] == last]
    return key if last == "name" or len(alike) > 1 else last


def is_recorded(found: Sequence[Run], metric: str | None) -> bool:
    """Returns whether a metric is in every run's training records, and in no evaluation."""
    return not any(metric in record for run in found for record in run.evaluations) and all(
        any(metric in record for record in run.trained) for run in found
    )


def history(found: Sequence[Run], metric: str, against: str) -> "Figure":
    """Plots a metric of the training records, and beside it the batch size, of every run.

    Args:
      found: the runs.
      metric: see `is_recorded`.
      against: 'epochs', 'updates' or 'examples'.
    """
    from lamb_tpu import style

    figure = style.figure(10.4, 4.4)
    left, right = figure.subplots(1, 2)
    for number, run in enumerate(found):
        color = style.numbered(number)["color"]
        # An infinite noise scale has no place on the axis.
        points = [
            (run.place(record, against), record[metric])
            for record in run.trained
            if isinstance(record.get(metric), float) and math.isfinite(record[metric])
        ]
        left.plot(
            *_columns(points),
            color=color,
            linewidth=1.2,
            label=run.name,
            marker="o" if len(points) == 1 else None,
        )
        sizes = [
            (run.place(record, against), record.get("batch_size", run.files.config["batch_size"]))
            for record in run.trained
        ]
        right.plot(*_columns(sizes), color=color, linewidth=1.2, drawstyle="steps-pre")
    style.dress(left, metric, _AXES[against], metric)
    style.dress(right, "batch size", _AXES[against], "batch size (examples)")
    if all((line.get_ydata() > 0).all() for line in left.lines):
        style.log_axis(left)
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:,g}")
    figure.legend(loc="outside lower center", ncols=min(len(found), 3), frameon=False, fontsize=8)
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> Any:
    """Returns x and y as arrays."""
    import numpy as np

    return np.array(points, np.float64).reshape(-1, 2).T


def picture(found: Sequence[Run], metric: tuple[str, str] | None, against: str) -> "Figure":
    """Plots the training loss, and the metric of the evaluations, of every run.

    Args:
      found: the runs.
      metric: see `choose_metric`.
      against: 'epochs', 'updates' or 'examples'.
    """
    from lamb_tpu import style

    figure = style.figure(5.2 * (2 if metric else 1), 4.4)
    panels = figure.subplots(1, 2 if metric else 1, squeeze=False)[0]
    for number, run in enumerate(found):
        look = style.numbered(number)
        losses = [
            (run.place(r, against), r["loss"])
            for r in run.trained
            if isinstance(r.get("loss"), float)
        ]
        curves = [losses]
        if metric:
            curves.append(
                [(run.place(record, against), value) for record, value in run.points(metric[0])]
            )
        for axes, points in zip(panels, curves):
            x, y = zip(*points) if points else ((), ())
            axes.plot(
                x,
                y,
                color=look["color"],
                marker=look["marker"],
                markersize=3,
                linewidth=1.2,
                markevery=max(1, len(x) // 12),
                label=run.name if axes is panels[0] else None,
            )
    label = _AXES[against]
    style.dress(panels[0], "training loss", label, "loss", "lower")
    if any(line.get_ydata().size for line in panels[0].lines):
        style.log_axis(panels[0])
    if metric:
        style.dress(panels[1], metric[0], label, metric[0], metric[1])
    figure.legend(loc="outside lower center", ncols=min(len(found), 3), frameon=False, fontsize=8)
    return figure


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.compare",
        epilog=_EXAMPLES,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output",
        default="compare.png",
        metavar="FILE.png",
        help="picture of the curves (default: %(default)s)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric of the evaluation (default: that of config.checkpoint.best or "
        "config.target, or the task's main one), or of the training records",
    )
    parser.add_argument(
        "--better",
        choices=("higher", "lower"),
        help="default: lower for a loss or an error, else higher",
    )
    parser.add_argument(
        "--against",
        choices=tuple(_AXES),
        help="quantity of the x axis (default: epochs; examples for a metric of "
        "the training records)",
    )
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    """Prints the tables and draws the picture."""
    from lamb_tpu import style
    from lamb_tpu.files import buckets, writing

    path = buckets.local(options.output, "--output")
    style.check_picture(path, "--output")
    found = read(options.runs)
    of_training = is_recorded(found, options.metric)
    metric = choose_metric(found, None if of_training else options.metric, options.better)
    for table in tables(found, metric):
        print(terminal.columns(table), end="\n\n")
    with writing.checked(path, "--output"):
        if of_training:
            figure = history(found, options.metric, options.against or "examples")
        else:
            figure = picture(found, metric, options.against or "epochs")
        figure.savefig(path)
    print(path)


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]  # the flags of absl, of which there are none here
    cli.run_main(lambda: main(_parse(given)))
