"""The page that shows when compression pays: compression.md and its figure."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jinja2
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from experiments.exchange import scaling, wire
from experiments.exchange.programs import (
    FOLDER,
    HOST_DEVICES,
    METHODS,
    MODELS,
    PER_DEVICE,
    STEP_SLICE,
    cases,
)
from experiments.exchange.scaling import DEVICES, NETWORKS, SavedRows, Time
from lamb_tpu import style

SLOWEST = 10.0  # Gb/s
IN_FIGURE = 512  # devices
WITHIN = 0.05  # largest fraction by which the sent bytes may exceed the minimum


class Line(NamedTuple):
    """A row of the table: the time of a step with each method, and the fastest method.

    Attributes:
      network: name of the network.
      devices: number of devices.
      cells: the time with each method, as text.
      winner: the fastest method.
      over: the winner's speed-ups over bfloat16 and over float32; '' for a method that is not compiled.
    """

    network: str
    devices: int
    cells: tuple[str, ...]
    winner: str
    over: tuple[str, ...]


def shown(saved: SavedRows) -> list[str]:
    """Returns the methods of the table: those compiled for at least one model, without aps e3m0."""
    return [
        method
        for method in METHODS
        if any(scaling.law_of(saved, model, method) for model in MODELS) and method != "aps e3m0"
    ]


def lines_of(saved: SavedRows, model: str) -> Iterator[Line]:
    """Yields the rows of a model; a single host has one row, because it does not use the network."""
    methods = shown(saved)
    for devices in DEVICES:
        for network, gbps in NETWORKS.items():
            if devices <= HOST_DEVICES and gbps is not None:
                continue
            times = {
                method: each
                for method, each in scaling.best(saved, model, devices, gbps).items()
                if method in methods
            }
            if not times:
                continue
            winner = next(iter(times))
            yield Line(
                "one host" if devices <= HOST_DEVICES else network,
                devices,
                tuple(_cell(times.get(method), method == winner) for method in methods),
                winner,
                tuple(
                    f"{times[plain].seconds / times[winner].seconds:.2f}" if plain in times else ""
                    for plain in ("bfloat16", "float32")
                ),
            )


def wire_lines(saved: SavedRows) -> Iterator[tuple[Mapping[str, Any], float, float]]:
    """Yields (row, minimum bytes, sent bytes / minimum bytes) for each exchange among all devices."""
    for topology in ("v5e-16", "v3-128"):
        for case in cases():
            row = saved.get(case.key)
            if row is not None and case.topology == topology and case.inner == 1:
                least = wire.least(row)
                yield row, least, wire.sent(row) / least


def write(saved: SavedRows) -> str:
    """Writes the page and its figure, and returns the page."""
    page = text(saved)
    (FOLDER / "compression.md").write_text(page)
    (FOLDER / "compression.svg").write_text(draw(saved))
    return page


def text(saved: SavedRows) -> str:
    """Returns the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = [case for case in cases() if case.key in saved]
    return environment.get_template("compression.md.j2").render(
        models={model: list(lines_of(saved, model)) for model in MODELS},
        methods=shown(saved),
        steps={model: each for model in MODELS if (each := scaling.step_seconds(model))},
        step_slice=STEP_SLICE,
        components={model: list(_components(saved, model)) for model in MODELS},
        wire=list(wire_lines(saved)),
        wide=wire.wide_share,
        sent=wire.sent,
        off=scaling.off_by(saved),
        checked=scaling.CHECKED,
        fitted=scaling.FITTED,
        constants=scaling.CONSTANTS,
        host_devices=HOST_DEVICES,
        per_device=PER_DEVICE,
        programs=[(case, saved[case.key]) for case in known],
        missing=[case.key for case in cases() if case.key not in saved],
        size=size_text,
        slowest=SLOWEST,
        in_figure=IN_FIGURE,
        versions=sorted(
            {
                ", ".join(f"{name} {number}" for name, number in row["versions"].items())
                for row in saved.values()
            }
        ),
    )


def _components(saved: SavedRows, model: str) -> Iterator[tuple[str, Time]]:
    """Yields each method, and the step time with `IN_FIGURE` devices on the slowest network."""
    for method, each in scaling.best(saved, model, IN_FIGURE, SLOWEST).items():
        if method in shown(saved):
            yield method, each


def size_text(size: float) -> str:
    """Formats bytes in decimal units.

    >>> size_text(84_056_527), size_text(1234), size_text(2.69e9)
    ('84.1 MB', '1.23 kB', '2.69 GB')
    """
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= length:
            return f"{size / length:.3g} {unit}"
    return f"{size:.0f} B"


def _cell(time: Time | None, is_winner: bool) -> str:
    if time is None:
        return ""
    text = f"{1e3 * time.seconds:,.4g}" + " h" * time.is_within
    return f"**{text}**" if is_winner else text


def draw(saved: SavedRows) -> str:
    """Plots the time of a step by number of devices and by network, as SVG."""
    known = [model for model in MODELS if any(lines_of(saved, model))] or list(MODELS)
    rates = [gbps for gbps in NETWORKS.values() if gbps is not None]
    split = [(model, panel) for model in known for panel in style.chunks(shown(saved)) or [[]]]
    figure, panels = style.stacked([2.9] * len(split), [methods for _, methods in split])
    shared: dict[str, Axes] = {}  # by model
    for panel, (model, methods) in zip(panels, split, strict=True):
        panel.suptitle(model, fontsize=11)
        left, right = panel.subplots(1, 2, sharey=True)
        if shared.setdefault(model, left) is not left:
            left.sharey(shared[model])
        for number, method in enumerate(methods):
            look = style.numbered(number)
            points = [
                (devices, 1e3 * time.seconds)
                for devices in DEVICES
                if (time := scaling.time(saved, model, method, devices, SLOWEST))
            ]
            left.plot([x for x, _ in points], [y for _, y in points], label=method, **look)
            by_network = [
                (gbps, 1e3 * time.seconds)
                for gbps in rates
                if (time := scaling.time(saved, model, method, IN_FIGURE, gbps))
            ]
            right.plot(*zip(*by_network), label=method, **look)
        for axes, title, label, ticks in (
            (left, f"{SLOWEST:g} Gb/s a host", "devices", DEVICES),
            (right, f"{IN_FIGURE} devices", "network of a host (Gb/s)", rates),
        ):
            style.dress(axes, title, label, "predicted step time (ms; lower is better)")
            style.log_axis(axes)
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
        right.set_ylabel("")
        style.legend_below(panel)
    return style.svg(figure)
