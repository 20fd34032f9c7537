"""The page that says when compression pays: compression.md and its picture."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jinja2
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
from experiments.exchange.scaling import DEVICES, NETWORKS, Kept, Time
from lamb_tpu import style

SLOWEST = 10.0  # Gb/s
IN_PICTURE = 512  # devices
WITHIN = 0.05  # of the least bytes


class Line(NamedTuple):
    """A row of the table: times of the methods, and the shortest.

    Attributes:
      network: its name.
      devices: number of devices.
      cells: a text for each method.
      winner: the method of the shortest time.
      over: how many times as fast as bfloat16 and float32 it is; '' if they are not compiled.
    """

    network: str
    devices: int
    cells: tuple[str, ...]
    winner: str
    over: tuple[str, ...]


def shown(kept: Kept) -> list[str]:
    """Returns the methods of the table: those that a program of some model has."""
    return [
        method
        for method in METHODS
        if any(scaling.law_of(kept, model, method) for model in MODELS) and method != "aps e3m0"
    ]


def lines_of(kept: Kept, model: str) -> Iterator[Line]:
    """Yields the rows of a model; one host has no network between hosts, and one row."""
    methods = shown(kept)
    for devices in DEVICES:
        for network, gbps in NETWORKS.items():
            if devices <= HOST_DEVICES and gbps is not None:
                continue
            found = {
                method: each
                for method, each in scaling.best(kept, model, devices, gbps).items()
                if method in methods
            }
            if not found:
                continue
            winner = next(iter(found))
            yield Line(
                "one host" if devices <= HOST_DEVICES else network,
                devices,
                tuple(_cell(found.get(method), method == winner) for method in methods),
                winner,
                tuple(
                    f"{found[plain].seconds / found[winner].seconds:.2f}" if plain in found else ""
                    for plain in ("bfloat16", "float32")
                ),
            )


def wire_lines(kept: Kept) -> Iterator[tuple[Mapping[str, Any], float, float]]:
    """Yields rows of programs over all devices, the least bytes, and the ratio to them."""
    for topology in ("v5e-16", "v3-128"):
        for case in cases():
            row = kept.get(case.key)
            if row is not None and case.topology == topology and case.inner == 1:
                least = wire.least(row)
                yield row, least, wire.sent(row) / least


def write(kept: Kept) -> str:
    """Writes the page and its picture, and returns the page."""
    page = text(kept)
    (FOLDER / "compression.md").write_text(page)
    (FOLDER / "compression.svg").write_text(picture(kept))
    return page


def text(kept: Kept) -> str:
    """Returns the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = [case for case in cases() if case.key in kept]
    return environment.get_template("compression.md.j2").render(
        models={model: list(lines_of(kept, model)) for model in MODELS},
        methods=shown(kept),
        steps={model: each for model in MODELS if (each := scaling.step_seconds(model))},
        step_slice=STEP_SLICE,
        parts={model: list(_parts(kept, model)) for model in MODELS},
        wire=list(wire_lines(kept)),
        wide=wire.wide_share,
        sent=wire.sent,
        off=scaling.off_by(kept),
        checked=scaling.CHECKED,
        fitted=scaling.FITTED,
        constants=scaling.CONSTANTS,
        host_devices=HOST_DEVICES,
        per_device=PER_DEVICE,
        programs=[(case, kept[case.key]) for case in known],
        missing=[case.key for case in cases() if case.key not in kept],
        size=size_text,
        slowest=SLOWEST,
        in_picture=IN_PICTURE,
        versions=sorted(
            {
                ", ".join(f"{name} {number}" for name, number in row["versions"].items())
                for row in kept.values()
            }
        ),
    )


def _parts(kept: Kept, model: str) -> Iterator[tuple[str, Time]]:
    """Yields the parts of a step at the picture's devices and the slowest network."""
    for method, each in scaling.best(kept, model, IN_PICTURE, SLOWEST).items():
        if method in shown(kept):
            yield method, each


def size_text(size: float) -> str:
    """Returns bytes in units of a thousand.

    >>> size_text(84_056_527), size_text(1234), size_text(2.69e9)
    ('84.1 MB', '1.23 kB', '2.69 GB')
    """
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= length:
            return f"{size / length:.3g} {unit}"
    return f"{size:.0f} B"


def _cell(found: Time | None, is_winner: bool) -> str:
    if found is None:
        return ""
    text = f"{1e3 * found.seconds:,.4g}" + " h" * found.is_within
    return f"**{text}**" if is_winner else text


def picture(kept: Kept) -> str:
    """Returns times of a step by devices and by the network, as SVG."""
    known = [model for model in MODELS if any(lines_of(kept, model))] or list(MODELS)
    figure = style.figure(10.0, 3.8 * len(known))
    rows = figure.subplots(len(known), 2, squeeze=False)
    rates = [gbps for gbps in NETWORKS.values() if gbps is not None]
    for model, (left, right) in zip(known, rows, strict=True):
        for number, method in enumerate(shown(kept)):
            look = style.numbered(number)
            points = [
                (devices, 1e3 * found.seconds)
                for devices in DEVICES
                if (found := scaling.time(kept, model, method, devices, SLOWEST))
            ]
            left.plot([x for x, _ in points], [y for _, y in points], label=method, **look)
            points = [
                (gbps, 1e3 * found.seconds)
                for gbps in rates
                if (found := scaling.time(kept, model, method, IN_PICTURE, gbps))
            ]
            right.plot([x for x, _ in points], [y for _, y in points], label=method, **look)
        for axes, title, label, ticks in (
            (left, f"{model}, {SLOWEST:g} Gb/s a host", "devices", DEVICES),
            (right, f"{model}, {IN_PICTURE} devices", "network of a host (Gb/s)", rates),
        ):
            style.dress(axes, title, label, "predicted time of a step (ms)", "lower")
            style.log_axis(axes)
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
    if shown(kept):  # one legend below, as the lines fill the axes
        lines, names = rows[0, 0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=len(names), fontsize=9)
    return style.svg(figure)
