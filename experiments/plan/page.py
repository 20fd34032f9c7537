"""The page of the calibration: calibration.md and its picture."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from experiments.plan import fit as fit_lib
from experiments.plan.fit import Fit, Sample
from experiments.plan.rows import FOLDER, Run, Source
from lamb_tpu import style
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


def sample_of(run: Run, kept: Kept) -> Sample | None:
    """Returns a run in numbers; None if a part is not compiled or does not fit."""
    parts = [kept.get(part.key(run.topology)) for part in run.parts]
    if not all(part and part["fits"] for part in parts):
        return None
    compute, basis = 0.0, [0.0, 0.0, 0.0]
    for part, each in zip(run.parts, parts, strict=True):
        assert each is not None
        compute += part.updates * each["compute"]
        basis = [sum_ + part.updates * one
                 for sum_, one in zip(basis, each["basis"], strict=True)]
    first = parts[0]
    assert first is not None
    compute += run.evaluated / first["batch_size"] * first["compute"] / 3
    links, hop, start = basis
    version = topology(run.topology).version
    return Sample(run.source, version, compute, (links, hop, start), run.seconds or 0.0)


def lines_of(sources: Sequence[Source], kept: Kept) -> tuple[Fit, list[Line]]:
    """Returns the fit to all measured runs that are compiled, and these runs."""
    found = [
        (run, sample) for source in sources for run in source.runs
        if run.seconds and (sample := sample_of(run, kept))
    ]
    samples = [sample for _, sample in found]
    fitted = fit_lib.fit(samples)
    each = zip(found, fit_lib.leave_out_runs(samples), fit_lib.leave_out_sources(samples),
               strict=True)
    return fitted, [
        Line(run, sample, kept[run.parts[0].key(run.topology)]["batch_size"],
             fitted.seconds(sample), alone, apart)
        for (run, sample), alone, apart in each
    ]


def write(sources: Sequence[Source], kept: Kept) -> str:
    """Writes the page and its picture, and returns the page."""
    _, lines = lines_of(sources, kept)
    (FOLDER / "calibration.svg").write_text(picture(lines))
    page = text(sources, kept)
    (FOLDER / "calibration.md").write_text(page)
    return page


def text(sources: Sequence[Source], kept: Kept) -> str:
    """Returns the page."""
    fitted, lines = lines_of(sources, kept)
    alone = [line.without_run for line in lines if line.without_run is not None]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True, autoescape=False,
    )
    return environment.get_template("calibration.md.j2").render(
        sources=sources, fitted=fitted, lines=lines, goal=GOAL, time=_time, percent=_percent,
        minutes=lambda seconds: f"{seconds / 60:.2f} min", speed=_speed,
        alone=errors(alone), apart=errors([line.without_source for line in lines]),
        beyond=[f"{line.run.source} on {line.run.topology}" for line in lines
                if line.without_run is not None and abs(line.without_run - 1) > GOAL],
        shares=[(line, network_share(line.sample, fitted)) for line in lines
                if line.run.all_reduce is not None],
        reported=[(line, line.seconds * line.run.reported_updates / line.run.parts[0].updates)
                  for line in lines if line.run.reported_updates],
        programs=list(_programs(sources, kept)),
        missing=sorted({
            f"{part.name} on {run.topology}" for source in sources for run in source.runs
            for part in run.parts if part.key(run.topology) not in kept
        }),
        planned=list(_planned(sources, kept, fitted, lines)),
        versions=sorted({
            ", ".join(f"{name} {number}" for name, number in each["versions"].items())
            for each in kept.values()
        }),
    )


def errors(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the largest relative error.

    >>> errors([1.1, 0.8, 1.0])
    (0.1, 0.2)
    """
    found = [round(abs(ratio - 1), 6) for ratio in ratios]
    return statistics.median(found), max(found)


def network_share(sample: Sample, fitted: Fit) -> float:
    """Returns the share of a run's time in which its computation waits for the network."""
    return fitted.network_seconds(sample) / fitted.seconds(sample)


def _planned(
    sources: Sequence[Source], kept: Kept, fitted: Fit, lines: Sequence[Line]
) -> Iterator[tuple[Run, list[float]]]:
    """Yields compiled runs that nobody ran: least, expected and most seconds; none if too large."""
    ratios = [line.without_source for line in lines]
    low, middle, high = (
        each.compute_factor for each in fit_lib.calibration(fitted, ratios, "").each
    )
    for run in (run for source in sources for run in source.runs if run.seconds is None):
        sample = sample_of(run, kept)
        if all(part.key(run.topology) in kept for part in run.parts):
            time = fitted.seconds(sample) / middle if sample else None
            yield run, [factor * time for factor in (low, middle, high)] if time else []


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


def picture(lines: Sequence[Line]) -> str:
    """Returns predicted time over measured time as SVG."""
    figure = style.figure(7.0, 4.5)
    axes = figure.add_subplot()
    times = [line.run.seconds or 1.0 for line in lines]
    ends = [min(times) / 1.3, max(times) * 1.3]
    axes.fill_between(ends, [end * (1 - GOAL) for end in ends], [end * (1 + GOAL) for end in ends],
                      color=style.NEUTRAL, alpha=0.2, linewidth=0, label=f"within {GOAL:.0%}")
    for number, source in enumerate(dict.fromkeys(line.run.source for line in lines)):
        points = [
            (line.run.seconds, line.without_run * (line.run.seconds or 1.0)) for line in lines
            if line.run.source == source and line.without_run is not None
        ]
        look = {**style.numbered(number), "linestyle": ""}
        axes.plot(*zip(*points, strict=True), label=source, **look)
    axes.set_xscale("log")
    style.log_axis(axes)
    style.dress(axes, "Published runs, each predicted from the others", "measured time (s)",
                "predicted time (s)")
    axes.legend(fontsize=8, loc="upper left")
    return style.svg(figure)
