"""The page of the calibration: calibration.md and its figure, and the constants of plans."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from experiments.plan import fit as fit_lib
from experiments.plan import generated, interval
from experiments.plan.fit import Fit, Sample
from experiments.plan.rows import FOLDER, LOGGED, Part, Run, Source
from lamb_tpu import style
from lamb_tpu.cost.network import Bounds, Calibrations
from lamb_tpu.cost.topology import topology

Kept = Mapping[str, Mapping[str, Any]]
GOAL = 0.15  # largest error of a run left out


class Line(NamedTuple):
    """A measured run on the page."""

    run: Run
    sample: Sample
    batch_size: int
    seconds: float  # predicted, with all runs in the fit
    without_run: float | None  # predicted by measured time, fitted to the other runs
    without_source: float  # the same, fitted to the other sources
    nested: Bounds  # constants and interval from the other sources

    @property
    def ends(self) -> tuple[float, float]:
        """Least and most seconds by the interval from the other sources."""
        low, _, high = (interval.seconds(each, self.sample) for each in self.nested)
        return low, high

    @property
    def is_covered(self) -> bool:
        """Returns whether the measured time is between these."""
        return interval.covers(self.nested, self.sample)


def sample_of(run: Run, kept: Kept) -> Sample | None:
    """Returns a run in numbers; None if a part is not compiled or does not fit."""
    parts = [kept.get(part.key(run.topology)) for part in run.parts]
    if not all(part and part["fits"] for part in parts):
        return None
    compute, basis = 0.0, [0.0, 0.0, 0.0]
    for part, each in zip(run.parts, parts, strict=True):
        assert each is not None
        compute += part.updates * each["compute"]
        basis = [sum_ + part.updates * one for sum_, one in zip(basis, each["basis"], strict=True)]
    first = parts[0]
    assert first is not None
    compute += run.evaluated / first["batch_size"] * first["compute"] / 3
    links, hop, start = basis
    version = topology(run.topology).version
    return Sample(run.source, version, compute, (links, hop, start), run.seconds or 0.0)


def lines_of(sources: Sequence[Source], kept: Kept) -> tuple[Fit, list[Line]]:
    """Returns the fit to all measured runs that are compiled, and these runs."""
    found = [
        (run, sample)
        for source in sources
        for run in source.runs
        if run.seconds and (sample := sample_of(run, kept))
    ]
    samples = [sample for _, sample in found]
    fitted = fit_lib.fit(samples)
    each = zip(
        found,
        fit_lib.leave_out_runs(samples),
        fit_lib.leave_out_sources(samples),
        interval.without_programs(samples),
        strict=True,
    )
    return fitted, [
        Line(
            run,
            sample,
            kept[run.parts[0].key(run.topology)]["batch_size"],
            fitted.seconds(sample),
            alone,
            apart,
            nested,
        )
        for (run, sample), alone, apart, nested in each
    ]


def calibrations(fitted: Fit, lines: Sequence[Line]) -> Calibrations:
    """Returns the constants that plans take."""
    samples = [line.sample for line in lines]
    logged = sum(line.run.source.startswith(LOGGED) for line in lines)
    runs = f"{len(lines) - logged} published" + f" and {logged} logged" * bool(logged)
    *others, last = fitted.generations
    versions = f"{', '.join(others)} and {last}" if others else last
    return interval.calibrations(
        fitted, samples, f"{runs} runs on TPU {versions}", interval.validate(samples)
    )


def write(sources: Sequence[Source], kept: Kept) -> str:
    """Writes the page, its figure and the module of the constants, and returns the page.

    The module is left as it is while a program is missing, so that plans always follow from all
    runs.
    """
    fitted, lines = lines_of(sources, kept)
    (FOLDER / "calibration.svg").write_text(figure(lines))
    page = text(sources, kept)
    (FOLDER / "calibration.md").write_text(page)
    if not missing(sources, kept):
        generated.PATH.write_text(generated.text(calibrations(fitted, lines)))
    return page


def missing(sources: Sequence[Source], kept: Kept) -> dict[str, tuple[str, Part]]:
    """Returns slice and part of the programs that are not compiled, by their keys."""
    found = {
        part.key(run.topology): (run.topology, part)
        for source in sources
        for run in source.runs
        for part in run.parts
    }
    return {key: each for key, each in found.items() if key not in kept}


def text(sources: Sequence[Source], kept: Kept) -> str:
    """Returns the page."""
    fitted, lines = lines_of(sources, kept)
    samples = [line.sample for line in lines]
    found = calibrations(fitted, lines)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("calibration.md.j2").render(
        sources=sources,
        fitted=fitted,
        lines=lines,
        goal=GOAL,
        time=_time,
        percent=_percent,
        minutes=lambda seconds: f"{seconds / 60:.2f} min",
        speed=_speed,
        validation=found.validation,
        without_assumption=interval.covered(interval.without_programs(samples, None), samples),
        programs_left_out=[
            f"{name} ({sum(hits)} of {len(hits)})"
            for name in fitted.factors
            if not all(hits := [line.is_covered for line in lines if line.run.source == name])
        ],
        widths={seen: interval.width(fitted, samples, seen) for seen in (True, False)},
        unseen=found.unseen.middle.compute_factor / fitted.factor,
        assumed=interval,
        known=found.known,
        any_other=found.unseen,
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
            (line, line.seconds * line.run.reported_updates / line.run.parts[0].updates)
            for line in lines
            if line.run.reported_updates
        ],
        programs=list(_programs(sources, kept)),
        missing=sorted(
            {f"{part.name} on {slice_name}" for slice_name, part in missing(sources, kept).values()}
        ),
        planned=list(_planned(sources, kept, found)),
        versions=sorted(
            {
                ", ".join(f"{name} {number}" for name, number in each["versions"].items())
                for each in kept.values()
            }
        ),
    )


def network_share(sample: Sample, fitted: Fit) -> float:
    """Returns the share of a run's time in which its computation waits for the network."""
    return fitted.network_seconds(sample) / fitted.seconds(sample)


def _planned(
    sources: Sequence[Source], kept: Kept, found: Calibrations
) -> Iterator[tuple[Run, list[float]]]:
    """Yields compiled runs that nobody ran: least, expected and most seconds; none if too large."""
    for run in (run for source in sources for run in source.runs if run.seconds is None):
        sample = sample_of(run, kept)
        if all(part.key(run.topology) in kept for part in run.parts):
            constants = found.for_generation(topology(run.topology).version).each
            yield run, [interval.seconds(each, sample) for each in constants] if sample else []


def _programs(
    sources: Sequence[Source], kept: Kept
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields name, slice and figures of each compiled program once."""
    keys = set[str]()
    for run in (run for source in sources for run in source.runs):
        for part in run.parts:
            key = part.key(run.topology)
            if key in kept and key not in keys:
                keys.add(key)
                yield part.name, run.topology, kept[key]


def _speed(line: Line, seconds: float) -> str:
    """Returns examples a millisecond of a run that takes so long as text."""
    return f"{line.batch_size * line.run.parts[0].updates / seconds / 1000:.4g}"


def _percent(share: float) -> str:
    """Returns a share as text.

    >>> _percent(0.0281), _percent(0.15)
    ('2.8 %', '15 %')
    """
    return f"{100 * share:.2g} %"


def _time(seconds: float) -> str:
    """Returns a time as text.

    >>> _time(72.6), _time(4571.4), _time(298_080)
    ('72.6 s', '76.2 min', '82.8 h')
    """
    unit, length = next(
        (unit for unit in (("h", 3600.0), ("min", 60.0)) if seconds >= 5 * unit[1]), ("s", 1.0)
    )
    return f"{seconds / length:,.1f} {unit}"


def figure(lines: Sequence[Line]) -> str:
    """Returns each run predicted from the others, and the intervals without its program, as SVG."""
    drawn = style.figure(11.0, 5.0)
    left, right = drawn.subplots(1, 2)
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
        spans = [
            [lines[row].ends[side] / middle for row, middle in zip(rows, expected, strict=True)]
            for side in (0, 1)
        ]
        right.hlines(rows, *spans, color=style.NEUTRAL, linewidth=1)
        right.plot(measured, rows, **look)
    left.set_xscale("log")
    style.log_axis(left)
    style.dress(
        left, "Each run, predicted from the others", "measured time (s)", "predicted time (s)"
    )
    left.legend(fontsize=8, loc="upper left")
    right.set_xscale("log")
    right.set_xticks([0.4, 0.6, 1.0, 1.5, 2.0], ["0.4", "0.6", "1", "1.5", "2"])
    right.minorticks_off()
    right.set_yticks(range(len(lines)), [line.run.topology for line in lines], fontsize=7)
    right.invert_yaxis()
    style.dress(
        right, "Each run and its interval, its program left out", "measured by predicted time", ""
    )
    return style.svg(drawn)
