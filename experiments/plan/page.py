"""The page of the calibration (calibration.md with its figure), and the constants for plans."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from experiments.plan import fit as fit_lib
from experiments.plan import generated, interval
from experiments.plan.fit import Fit, Sample
from experiments.plan.rows import FOLDER, LOGGED, Phase, Run, Source
from lamb_tpu import style
from lamb_tpu.cost.network import Bounds, Calibrations
from lamb_tpu.cost.topology import topology
from lamb_tpu.errors import listed

SavedRows = Mapping[str, Mapping[str, Any]]
GOAL = 0.15  # largest error of a left-out run


class Line(NamedTuple):
    """A measured run on the page."""

    run: Run
    sample: Sample
    batch_size: int
    seconds: float  # predicted, with all runs in the fit
    without_run: float | None  # predicted over measured time, with the run left out of the fit
    without_source: float  # the same ratio, with the source left out
    nested: Bounds  # constants and interval from the other sources

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval in seconds, from constants fitted to the other sources."""
        low, _, high = (interval.seconds(each, self.sample) for each in self.nested)
        return low, high

    @property
    def is_covered(self) -> bool:
        """True if the interval contains the measured time."""
        return interval.covers(self.nested, self.sample)


def sample_of(run: Run, saved: SavedRows) -> Sample | None:
    """Returns a run's numbers; None if one of its programs is not compiled or does not fit into memory."""
    phases = [saved.get(phase.key(run.topology)) for phase in run.phases]
    if not all(phase and phase["fits"] for phase in phases):
        return None
    compute, basis = 0.0, [0.0, 0.0, 0.0]
    for phase, each in zip(run.phases, phases, strict=True):
        assert each is not None
        compute += phase.updates * each["compute"]
        basis = [sum_ + phase.updates * one for sum_, one in zip(basis, each["basis"], strict=True)]
    first = phases[0]
    assert first is not None
    compute += run.evaluated / first["batch_size"] * first["compute"] / 3
    links, hop, start = basis
    version = topology(run.topology).version
    return Sample(run.source, version, compute, (links, hop, start), run.seconds or 0.0)


def lines_of(sources: Sequence[Source], saved: SavedRows) -> tuple[Fit, list[Line]]:
    """Returns the fit to all measured runs whose programs are compiled, and a line for each of these runs."""
    pairs = [
        (run, sample)
        for source in sources
        for run in source.runs
        if run.seconds and (sample := sample_of(run, saved))
    ]
    samples = [sample for _, sample in pairs]
    fitted = fit_lib.fit(samples)
    each = zip(
        pairs,
        fit_lib.leave_out_runs(samples),
        fit_lib.leave_out_sources(samples),
        interval.without_programs(samples),
        strict=True,
    )
    return fitted, [
        Line(
            run=run,
            sample=sample,
            batch_size=saved[run.phases[0].key(run.topology)]["batch_size"],
            seconds=fitted.seconds(sample),
            without_run=alone,
            without_source=apart,
            nested=nested,
        )
        for (run, sample), alone, apart, nested in each
    ]


def calibrations(fitted: Fit, lines: Sequence[Line]) -> Calibrations:
    """Returns the constants for plans."""
    samples = [line.sample for line in lines]
    logged = sum(line.run.source.startswith(LOGGED) for line in lines)
    runs = f"{len(lines) - logged} published" + f" and {logged} logged" * bool(logged)
    *others, last = fitted.generations
    versions = f"{', '.join(others)} and {last}" if others else last
    return interval.calibrations(
        fitted, samples, f"{runs} runs on TPU {versions}", interval.validate(samples)
    )


def write(sources: Sequence[Source], saved: SavedRows) -> str:
    """Writes the page, its figure and the module calibrated.py, and returns the page.

    While a program is missing, calibrated.py stays unchanged, so that plans always follow from all runs.
    """
    fitted, lines = lines_of(sources, saved)
    (FOLDER / "calibration.svg").write_text(figure(lines))
    page = text(sources, saved)
    (FOLDER / "calibration.md").write_text(page)
    if not missing(sources, saved):
        generated.PATH.write_text(generated.text(calibrations(fitted, lines)))
    return page


def missing(sources: Sequence[Source], saved: SavedRows) -> dict[str, tuple[str, Phase]]:
    """Returns the slice and phase of each uncompiled program, by key."""
    wanted = {
        phase.key(run.topology): (run.topology, phase)
        for source in sources
        for run in source.runs
        for phase in run.phases
    }
    return {key: each for key, each in wanted.items() if key not in saved}


def text(sources: Sequence[Source], saved: SavedRows) -> str:
    """Returns the page."""
    fitted, lines = lines_of(sources, saved)
    samples = [line.sample for line in lines]
    calibrated = calibrations(fitted, lines)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("calibration.md.j2").render(
        sources=sources,
        fitted=fitted,
        listed=listed,
        lines=lines,
        goal=GOAL,
        time=_time,
        percent=_percent,
        minutes=lambda seconds: f"{seconds / 60:.2f} min",
        speed=_speed,
        validation=calibrated.validation,
        without_assumption=interval.covered(interval.without_programs(samples, None), samples),
        programs_left_out=[
            f"{name} ({sum(hits)} of {len(hits)})"
            for name in fitted.factors
            if not all(hits := [line.is_covered for line in lines if line.run.source == name])
        ],
        widths={seen: interval.width(fitted, samples, seen) for seen in (True, False)},
        unseen=calibrated.unseen.middle.compute_factor / fitted.factor,
        assumed=interval,
        known=calibrated.known,
        any_other=calibrated.unseen,
        beyond=[
            f"{line.run.source} on {line.run.topology}"
            for line in lines
            if line.without_run is not None and abs(line.without_run - 1) > GOAL
        ],
        shares=[
            (line, network_share(line.sample, fitted))
            for line in lines
            if line.run.all_reduce is not None
        ],
        reported=[
            (line, line.seconds * line.run.reported_updates / line.run.phases[0].updates)
            for line in lines
            if line.run.reported_updates
        ],
        programs=list(_programs(sources, saved)),
        missing=sorted(
            {
                f"{phase.name} on {slice_name}"
                for slice_name, phase in missing(sources, saved).values()
            }
        ),
        planned=list(_planned(sources, saved, calibrated)),
        versions=sorted(
            {
                ", ".join(f"{name} {number}" for name, number in each["versions"].items())
                for each in saved.values()
            }
        ),
    )


def network_share(sample: Sample, fitted: Fit) -> float:
    """Returns the share of a run's time in which its computation waits for the network."""
    return fitted.network_seconds(sample) / fitted.seconds(sample)


def _planned(
    sources: Sequence[Source], saved: SavedRows, calibrated: Calibrations
) -> Iterator[tuple[Run, list[float]]]:
    """Yields compiled, unmeasured runs, and their low, expected and high seconds ([] if they do not fit).

    Runs that give a value of a table are on that table's page instead.
    """
    runs = [run for source in sources for run in source.runs]
    for run in (run for run in runs if run.seconds is None and not run.cells):
        sample = sample_of(run, saved)
        if all(phase.key(run.topology) in saved for phase in run.phases):
            constants = calibrated.for_generation(topology(run.topology).version).each
            yield run, [interval.seconds(each, sample) for each in constants] if sample else []


def _programs(
    sources: Sequence[Source], saved: SavedRows
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields the name, slice and stored figures of each compiled program, once per program."""
    keys = set[str]()
    for run in (run for source in sources for run in source.runs):
        for phase in run.phases:
            key = phase.key(run.topology)
            if key in saved and key not in keys:
                keys.add(key)
                yield phase.name, run.topology, saved[key]


def _speed(line: Line, seconds: float) -> str:
    """Formats the examples per millisecond of a run that takes `seconds`."""
    return f"{line.batch_size * line.run.phases[0].updates / seconds / 1000:.4g}"


def _percent(share: float) -> str:
    """Formats a share as a percentage.

    >>> _percent(0.0281), _percent(0.15)
    ('2.8 %', '15 %')
    """
    return f"{100 * share:.2g} %"


def _time(seconds: float) -> str:
    """Formats a time in the largest suitable unit.

    >>> _time(72.6), _time(4571.4), _time(298_080)
    ('72.6 s', '76.2 min', '82.8 h')
    """
    unit, length = next(
        (unit for unit in (("h", 3600.0), ("min", 60.0)) if seconds >= 5 * unit[1]), ("s", 1.0)
    )
    return f"{seconds / length:,.1f} {unit}"


def figure(lines: Sequence[Line]) -> str:
    """Returns a plot of predicted times and intervals of left-out runs, as SVG."""
    drawn, (above, below) = style.stacked([4.6, 1.0 + 0.2 * len(lines)])
    left, right = above.subplots(), below.subplots()
    times = [line.run.seconds or 1.0 for line in lines]
    ends = [min(times) / 1.3, max(times) * 1.3]
    left.fill_between(
        ends,
        [end * (1 - GOAL) for end in ends],
        [end * (1 + GOAL) for end in ends],
        color=style.NEUTRAL,
        alpha=0.2,
        linewidth=0,
        label=f"within {GOAL:.0%}",
    )
    for number, source in enumerate(dict.fromkeys(line.run.source for line in lines)):
        points = [
            (line.run.seconds, line.without_run * (line.run.seconds or 1.0))
            for line in lines
            if line.run.source == source and line.without_run is not None
        ]
        look = {**style.numbered(number), "linestyle": ""}
        left.plot(*(zip(*points) if points else ([], [])), label=source, **look)
        rows = [row for row, line in enumerate(lines) if line.run.source == source]
        expected = [interval.seconds(lines[row].nested.middle, lines[row].sample) for row in rows]
        measured = [times[row] / middle for row, middle in zip(rows, expected, strict=True)]
        low, high = (
            [lines[row].ends[side] / middle for row, middle in zip(rows, expected, strict=True)]
            for side in (0, 1)
        )
        right.hlines(rows, low, high, color=style.NEUTRAL, linewidth=1)
        right.plot(measured, rows, **look)
    left.set_xscale("log")
    style.log_axis(left)
    style.dress(
        left, "Each run, predicted from the others", "measured time (s)", "predicted time (s)"
    )
    style.legend_below(above)
    right.set_xscale("log")
    right.set_xticks([0.4, 0.6, 1.0, 1.5, 2.0], ["0.4", "0.6", "1", "1.5", "2"])
    right.minorticks_off()
    right.set_yticks(range(len(lines)), [line.run.topology for line in lines])
    right.invert_yaxis()
    style.dress(
        right, "Each run and its interval, its program left out", "measured by predicted time", ""
    )
    return style.svg(drawn)
