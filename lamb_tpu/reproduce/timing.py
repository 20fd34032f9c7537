"""Times of a table's runs: measured or, for platforms without records, estimated in the table's file."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lamb_tpu.reproduce.records import Record
from lamb_tpu.reproduce.tables import Scale


class Span(NamedTuple):
    """Median, shortest and longest time of some runs in seconds, and the number of runs (0: an estimate)."""

    median: float
    low: float
    high: float
    runs: int


def span(records: Iterable[Record]) -> Span | None:
    """Returns the times of completed runs; None if no run is complete."""
    # A diverged run ended early, so its time is too short.
    seconds = [record["seconds"] for record in records if record["values"] is not None]
    if not seconds:
        return None
    return Span(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def cost(scale: Scale, records: Sequence[Record]) -> str:
    """Returns the hardware and time of a run at a scale, as text; '' if neither is known."""
    groups: dict[tuple[str, int | None], list[Record]] = {}
    for record in records:
        groups.setdefault((record["device"], record["cores"]), []).append(record)
    texts = [
        f"{_time(times)} on {_machine(*key)} ({_range(times)}; {_processors(group)})"
        for key, group in groups.items()
        if (times := span(group)) is not None
    ]
    measured = {platform(record["device"]) for record in records}
    texts += [
        f"about {_time(Span(60 * minutes, 0.0, 0.0, 0))} on a {name.upper()} (estimated)"
        for name, minutes in scale.minutes.items()
        if name not in measured
    ]
    return ", ".join(filter(None, [scale.hardware, *texts]))


def platform(device: str) -> str:
    """Returns the platform of a device, as JAX names it.

    >>> platform("cpu"), platform("TPU v3"), platform("NVIDIA H100 80GB HBM3")
    ('cpu', 'tpu', 'gpu')
    """
    if device == "cpu":
        return "cpu"
    return "tpu" if device.startswith("TPU") else "gpu"


def text(times: Span) -> str:
    """Formats times, such as 'about 8.4 minutes (6.2 to 16.1 in 23 runs)'."""
    unit = _unit(times.median)
    return f"about {_number(times.median, unit)} {unit[0]} ({_range(times)})"


def _machine(device: str, cores: int | None) -> str:
    if device != "cpu":
        return device
    return "a CPU" if cores is None else f"{cores} CPU cores"


def _processors(records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(record.get("processor") for record in records))
    known = [name for name in names if name]
    if not known:
        return "processor not recorded"
    return " or ".join(known) + (", or not recorded" if None in names else "")


_Unit = tuple[str, float]


def _unit(seconds: float) -> _Unit:
    """Returns the unit in which to show a time, and the unit's length in seconds."""
    if seconds >= 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if seconds >= 60 else ("seconds", 1.0)


def _number(seconds: float, unit: _Unit) -> str:
    value = seconds / unit[1]
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}" if value >= 9.95 else f"{value:.2g}"


def _time(times: Span) -> str:
    unit = _unit(times.median)
    number = _number(times.median, unit)
    return f"{number} {unit[0].removesuffix('s') if number == '1' else unit[0]} per run"


def _range(times: Span) -> str:
    if not times.runs:
        return "estimated"
    if times.runs == 1:
        return "1 run"
    unit = _unit(times.median)
    ends = [_number(each, unit) for each in (times.low, times.high)]
    return f"{' to '.join(dict.fromkeys(ends))} in {times.runs} runs"
