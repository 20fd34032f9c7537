"""Predicted times of one config on several slices, beside measured ones: `--topologies=...`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from ml_collections import ConfigDict

from lamb_tpu import style, terminal
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.files import writing
from lamb_tpu.plan import page
from lamb_tpu.plan.totals import span_text
from lamb_tpu.plan.trials import LEFT_OUT, Answer, Trial, Trials, check_any, milliseconds, table


class Point(NamedTuple):
    """A config on a slice.

    Attributes:
      topology: name of the slice.
      devices: number of devices.
      trials: the outcome of each phase; one for a config without phases.
      measured: seconds of a measured run; None if there is none.
    """

    topology: str
    devices: int
    trials: tuple[Trial, ...]
    measured: float | None

    @property
    def refused(self) -> Trial | None:
        """The first phase that was refused; None without one."""
        return next((trial for trial in self.trials if trial.refused), None)

    @property
    def seconds(self) -> tuple[float, ...] | None:
        """Time of all phases: shortest, expected, longest; None if one of them does not run."""
        totals = [trial.totals for trial in self.trials if trial.fits and trial.totals]
        if len(totals) < len(self.trials):
            return None
        return tuple(sum(total.seconds[bound] for total in totals) for bound in range(3))

    @property
    def ratio(self) -> float | None:
        """Predicted time divided by the measured one."""
        return self.seconds[1] / self.measured if self.seconds and self.measured else None

    def cells(self) -> list[str]:
        """Returns the columns up to the total time; up to 'refused' or 'does not fit' without."""
        found = [self.topology, f"{self.devices:,}"]
        if self.refused:
            return [*found, "refused"]
        if not all(trial.fits for trial in self.trials):
            return [*found, "does not fit"]
        steps = [trial.step_seconds for trial in self.trials]
        found.append(
            milliseconds(steps[0])
            if len(steps) == 1
            else " + ".join(milliseconds(each).partition(" ")[0] for each in steps)
        )
        if not self.seconds:
            return [*found, "?", ""]
        low, expected, high = self.seconds
        return [*found, span_text(expected, expected), span_text(low, high)]

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
    phases: Sequence[tuple[str, ConfigDict]],
    topologies: Sequence[str],
    measured: Mapping[str, float],
    trials: Trials,
) -> list[Point]:
    """Returns the points of a config's curve.

    Args:
      phases: name and config of each phase; the name is '' for a config without phases.
      topologies: names of the slices.
      measured: seconds of measured runs, by slice.
      trials: makes the plans, one for each phase and slice.

    Raises:
      UserError: every slice is refused.
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
    check_any([point.refused or point.trials[0] for point in points])
    return points


def answer(points: Sequence[Point]) -> Answer:
    """Returns the table of a curve."""
    has_measured = any(point.measured for point in points)
    head = ["slice", "devices", "ms a step", "total", "from to"]
    head += ["measured", "predicted/measured"] * has_measured
    rows = []
    for point in points:
        cells = point.cells()
        if point.measured and not point.refused:
            cells += [""] * (5 - len(cells)) + [span_text(point.measured, point.measured)]
            cells += [f"{point.ratio:.2f}"] if point.ratio else []
        rows.append((cells, point.refused or point.trials[0]))
    text = f"{table(head, rows, right=(1,))}\n{terminal.fit(f'left out: {LEFT_OUT}')}"
    return Answer(text, {"points": [each.as_json() for each in points]})


def write_page(points: Sequence[Point], found: Answer, path: pathlib.Path) -> None:
    """Writes a curve as one page, with its picture and its table.

    Raises:
      UserError: the file cannot be written.
    """
    text = page.render(
        "curves.html.j2",
        title="Predicted time by number of devices",
        table=found.text,
        picture=page.svg(picture(points)),
        left_out=LEFT_OUT,
        validated=CALIBRATED.validation.describe(),
    )
    with writing.checked(path, "--html"):
        path.write_text(text, "utf-8")


def picture(points: Sequence[Point]) -> Figure:
    """Plots predicted times with their intervals, and measured ones, over the devices."""
    figure = style.figure(7.5, 4.5)
    axes = figure.subplots()
    known = sorted(
        ((point.devices, point.seconds) for point in points if point.seconds),
        key=lambda each: each[0],
    )
    if known:
        devices, seconds = zip(*known)
        low, expected, high = ([each / 60 for each in bound] for bound in zip(*seconds))
        look = style.OPTIMIZERS["lamb"]
        axes.fill_between(devices, low, high, color=look.color, alpha=0.2, label="interval")
        axes.plot(devices, expected, color=look.color, marker=look.marker, label="predicted")
    measured = [(point.devices, point.measured / 60) for point in points if point.measured]
    if measured:
        look = style.OPTIMIZERS["adamw"]
        axes.scatter(
            *zip(*measured), color=look.color, marker=look.marker, zorder=3, label="measured"
        )
    style.dress(axes, "Time of the run", "devices", "time (min)", better="lower")
    style.batch_axis(axes, sorted({point.devices for point in points}))
    style.log_axis(axes)
    if known or measured:
        axes.legend(frameon=False)
    return figure
