"""Predicted and measured times of one config on several slices: `--topologies=...`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from lamb_tpu import style, terminal
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.files import writing
from lamb_tpu.plan import page
from lamb_tpu.plan.totals import span_text
from lamb_tpu.plan.trials import LEFT_OUT, Answer, Trial, Trials, check_any, milliseconds, table
from lamb_tpu.spec import Spec


class Point(NamedTuple):
    """The plans of a config on one slice, and its measured time."""

    topology: str
    devices: int  # number of devices
    trials: tuple[Trial, ...]  # the outcome of each phase; one for a config without phases
    measured: float | None  # seconds of a measured run; None if there is none

    @property
    def rejected(self) -> Trial | None:
        """The first rejected phase; None if no phase was rejected."""
        return next((trial for trial in self.trials if trial.error), None)

    @property
    def seconds(self) -> tuple[float, ...] | None:
        """Time of all phases: shortest, expected, longest; None if the time of a phase is unknown."""
        totals = [trial.totals for trial in self.trials if trial.fits and trial.totals]
        if len(totals) < len(self.trials):
            return None
        return tuple(sum(total.seconds[bound] for total in totals) for bound in range(3))

    @property
    def ratio(self) -> float | None:
        """Predicted time divided by measured time; None if either is unknown."""
        return self.seconds[1] / self.measured if self.seconds and self.measured else None

    def cells(self) -> list[str]:
        """Returns the cells from the slice to the interval; a reason or '?' replaces unknown times."""
        cells = [self.topology, f"{self.devices:,}"]
        if self.rejected:
            return [*cells, "rejected"]
        if not all(trial.fits for trial in self.trials):
            return [*cells, "does not fit"]
        steps = [trial.step_seconds for trial in self.trials]
        cells.append(
            milliseconds(steps[0])
            if len(steps) == 1
            else " + ".join(milliseconds(each).partition(" ")[0] for each in steps)
        )
        if not self.seconds:
            return [*cells, "?", ""]
        low, expected, high = self.seconds
        return [*cells, span_text(expected, expected), span_text(low, high)]

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as a dict of JSON values."""
        return {
            "topology": self.topology,
            "devices": self.devices,
            "phases": [trial.as_json() for trial in self.trials],
            "seconds": self.seconds and list(self.seconds),
            "measured_seconds": self.measured,
            "predicted_by_measured": self.ratio,
        }


def plan(
    phases: Sequence[tuple[str, Spec]],
    topologies: Sequence[str],
    measured: Mapping[str, float],
    trials: Trials,
) -> list[Point]:
    """Plans the phases of a config on several slices.

    Args:
      phases: (name, config) of each phase; a config without phases is one phase with the name ''.
      topologies: names of the slices.
      measured: slice -> seconds of a measured run.
      trials: makes the plans, one for each phase and slice.

    Raises:
      UserError: every slice is rejected.
    """
    points = [
        Point(
            name,
            topology_lib.topology(name).num_devices,
            tuple(
                trials.make(config, name, f"{phase} for {name}" if phase else name)
                for phase, config in phases
            ),
            measured.get(name),
        )
        for name in topologies
    ]
    check_any([point.rejected or point.trials[0] for point in points])
    return points


def answer(points: Sequence[Point]) -> Answer:
    """Formats the points as a table and as JSON."""
    has_measured = any(point.measured for point in points)
    head = ["slice", "devices", "ms a step", "total", "low to high"]
    head += ["measured", "predicted/measured"] * has_measured
    rows = []
    for point in points:
        cells = point.cells()
        if point.measured and not point.rejected:
            cells += [""] * (5 - len(cells)) + [span_text(point.measured, point.measured)]
            cells += [f"{point.ratio:.2f}"] if point.ratio else []
        rows.append((cells, point.rejected or point.trials[0]))
    text = f"{table(head, rows, right=(1,))}\n{terminal.fit(f'left out: {LEFT_OUT}')}"
    return Answer(text, {"points": [each.as_json() for each in points]})


def write_page(points: Sequence[Point], result: Answer, path: pathlib.Path) -> None:
    """Writes a page with the plot and the table of the points."""
    text = page.render(
        "curves.html.j2",
        title="Predicted time by number of devices",
        table=result.text,
        plot=page.svg(plot(points)),
        left_out=LEFT_OUT,
        validated=CALIBRATED.validation.describe(),
    )
    writing.replace(path, text, "--html")


def plot(points: Sequence[Point]) -> Figure:
    """Plots predicted times with their intervals, and measured times, over the number of devices."""
    figure = style.figure(style.WIDTH, 3.9)
    axes = figure.subplots()
    known = sorted(
        ((point.devices, point.seconds) for point in points if point.seconds),
        key=lambda each: each[0],
    )
    if known:
        devices, seconds = zip(*known)
        low, expected, high = ([each / 60 for each in bound] for bound in zip(*seconds))
        look = style.numbered(0)
        axes.fill_between(devices, low, high, color=look["color"], alpha=0.2, label="interval")
        axes.plot(devices, expected, **look, label="predicted")
    measured = [(point.devices, point.measured / 60) for point in points if point.measured]
    if measured:
        look = style.numbered(2) | {"linestyle": ""}
        axes.plot(*zip(*measured), **look, zorder=3, label="measured")
    style.dress(axes, "Time of the run", "devices", "time (min)", better="lower")
    style.batch_axis(axes, sorted({point.devices for point in points}))
    style.log_axis(axes)
    style.legend_below(figure)
    return figure
