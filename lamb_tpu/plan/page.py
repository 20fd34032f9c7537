"""A plan as one self-contained HTML page with inline figures, for light and dark mode."""

import itertools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.cost import hlo, operations
from lamb_tpu.cost.network import AXES
from lamb_tpu.cost.operations import Operation
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.plan.report import Plan, decision, size_text
from lamb_tpu.plan.totals import span_text

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_MOST_EXPENSIVE = 10  # kernels on the page
_DRAWN = (8, 4)  # largest number of chips drawn along a side, with two axes and with three
_COLORS = [style.OPTIMIZERS[name].color for name in ("lamb", "lars", "adamw")]  # x, y and z
# Direction in which the third axis is drawn.
_SLANT = (0.35, 0.22)


class Section(NamedTuple):
    """A plan as a section of the page."""

    name: str  # the phase; '' for a config without phases
    plan: Plan
    metadata: list[tuple[str, str]]  # (name, value) pairs
    images: list[tuple[str, str]]  # (caption, SVG) pairs
    # The most expensive kernels, each with its milliseconds and share of the estimate.
    kernels: list[tuple[Operation, float, float]]


def check_page(path: str) -> pathlib.Path:
    """Checks and returns the path of a page.

    Raises:
      UserError: `path` is not a .html file in an existing folder, or cannot be written.
    """
    page = buckets.local(path, "--html")
    if page.suffix != ".html" or not os.path.isdir(page.parent):
        raise UserError(
            "--html", path, "is not a .html file in an existing folder", "use a path like a.html"
        )
    return writing.check_target(page, "--html")


def write_page(plans: Sequence[tuple[str, Plan]], path: pathlib.Path) -> None:
    """Writes the plans of a config to one page; `plans` has (phase, plan) pairs, see `Section`."""
    text = render(
        "plan.html.j2",
        sections=[_section(name, plan) for name, plan in plans],
        title=plans[0][1].topology.name,
        decision=decision([plan for _, plan in plans]),
        size_text=size_text,
    )
    writing.replace(path, text, "--html")


def render(template: str, **values: Any) -> str:
    """Renders a template of the folder `templates`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _section(name: str, plan: Plan) -> Section:
    slice_ = plan.topology
    metadata = [
        ("slice", f"{slice_.name}: {slice_.num_chips:,} chips on {plan.hosts:,} hosts"),
        ("mesh", ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())),
        ("batch", f"{plan.batch_size:,}"),
        *([("optimizer", plan.leaves)] if plan.leaves else []),
    ]
    if plan.step_seconds:
        low, middle, high = plan.step_seconds
        metadata.append(("a step", f"{1e3 * middle:.3g} ms ({1e3 * low:.3g} to {1e3 * high:.3g})"))
    if total := plan.totals:
        metadata.append(("the run", span_text(total.seconds[0], total.seconds[2])))
    metadata += plan.sending
    metadata.append(("left out", plan.left_out))
    metadata.append(("fitted to", plan.calibration.fitted_to))
    metadata.append(("validated", plan.calibration.validation.describe()))
    images, kernels = list[tuple[str, str]](), list[tuple[Operation, float, float]]()
    if plan.memory is not None:
        usable = size_text(slice_.generation.usable)
        caption = f"Memory of a device, by type. The line marks the {usable} that programs may use."
        images.append((caption, svg(_memory(plan))))
    if plan.cycles and plan.program:
        ranked = operations.operations(hlo.parse(plan.program))
        clock, total_cycles = slice_.generation.clock, sum(each.cycles for each in ranked)
        kernels = [
            (each, 1e3 * each.cycles / clock, each.cycles / total_cycles)
            for each in ranked[:_MOST_EXPENSIVE]
        ]
        types = {kind: 1e3 * cycles / clock for kind, cycles in operations.by_kind(ranked).items()}
        caption = "Time of a step, by type of operation, as the compiler estimates it"
        tail = "; the bar of the network shows its interval." if plan.times else "."
        images.append((caption + tail, svg(_times(plan, types))))
    if plan.collectives:
        images.append(
            (
                f"Links of a slice, with at most {_most(plan)} chips along a side. The width of a "
                "line shows how long collectives use that axis in a step; a dotted line closes a ring.",
                svg(_torus(plan)),
            )
        )
    return Section(name=name, plan=plan, metadata=metadata, images=images, kernels=kernels)


def svg(figure: Figure) -> str:
    """Returns a figure as an inline SVG element, without the XML header of a file."""
    text = style.svg(figure)
    # Remove the size in points, so that the figure shrinks on a phone.
    return re.sub(r' (width|height)="[^"]*pt"', "", text[text.index("<svg") :], count=2)


def _bars(
    values: Mapping[str, float],
    title: str,
    unit: str,
    span: tuple[float, float] | None = None,
    limit: float | None = None,
) -> Figure:
    """Plots a bar for each value; `span` is the interval of the last value."""
    figure = style.figure(style.WIDTH, 0.9 + 0.36 * len(values))
    axes = figure.subplots()
    names = list(values)
    errors: Any = None
    if span:
        last = values[names[-1]]
        errors = [
            [0.0] * (len(names) - 1) + [max(0.0, last - span[0])],
            [0.0] * (len(names) - 1) + [max(0.0, span[1] - last)],
        ]
    axes.barh(
        names,
        list(values.values()),
        color=style.OPTIMIZERS["lamb"].color,
        height=0.6,
        xerr=errors,
        ecolor=style.NEUTRAL,
    )
    axes.invert_yaxis()
    if limit is not None:
        axes.axvline(limit, color=style.OPTIMIZERS["adamw"].color)
    style.dress(axes, title, unit, "")
    axes.xaxis.set_major_formatter("{x:,.3g}")
    return figure


def _memory(plan: Plan) -> Figure:
    assert plan.memory is not None
    memory, gib = plan.memory, 2**30
    return _bars(
        {
            "peak": memory.peak / gib,
            "state and batch": memory.arguments / gib,
            "temporaries": memory.temporaries / gib,
            "new outputs": (memory.outputs - memory.aliased) / gib,
            "program": memory.program / gib,
        },
        f"{plan.topology.name}: memory of a device",
        "GiB",
        limit=plan.topology.generation.usable / gib,
    )


def _times(plan: Plan, types: Mapping[str, float]) -> Figure:
    title = f"{plan.topology.name}: time of a step"
    if plan.times is None:
        return _bars(types, title, "ms")
    low, middle, high = (1e3 * each.exposed for each in plan.times)
    return _bars({**types, "waiting for the network": middle}, title, "ms", span=(low, high))


def _torus(plan: Plan) -> Figure:
    """Plots chips and links of a slice; the width of a link shows the time along its axis."""
    times, rings = _axis_times(plan)
    sides = tuple(min(side, _most(plan)) for side in (*plan.topology.shape, 1, 1)[:3])
    longest = max(times.values(), default=0.0) or 1.0
    height = 1.6 + 2.4 * min(1.0, (sides[1] + _SLANT[1] * sides[2]) / sides[0])
    figure = style.figure(style.WIDTH, height)
    axes = figure.subplots()
    chips = list(itertools.product(*map(range, sides)))
    for number, axis in enumerate(AXES):
        links, closing = [], []
        for chip in chips:
            other = list(chip)
            other[number] += 1
            if other[number] < sides[number]:
                links.append((_flat(chip), _flat(other)))
            elif axis in rings and sides[number] > 1:
                # Draw the link that closes a ring as a stub.
                stub = [float(position) for position in chip]
                stub[number] += 0.45
                closing.append((_flat(chip), _flat(stub)))
        width = 0.6 + 2.4 * times.get(axis, 0.0) / longest
        color = _COLORS[number] if axis in times else style.NEUTRAL
        label = f"{axis}: {1e3 * times[axis]:.3g} ms" if axis in times else f"{axis}: not used"
        if sides[number] > 1:
            axes.add_collection(LineCollection(links, label=label, colors=color, linewidths=width))
            axes.add_collection(LineCollection(closing, colors=color, linestyles=":"))
    across, up = zip(*map(_flat, chips))
    axes.scatter(across, up, s=8, color="black", zorder=3)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title(
        f"{plan.topology.name}: {'x'.join(map(str, plan.topology.shape))} chips", fontsize=11
    )
    style.legend_below(figure)
    return figure


def _most(plan: Plan) -> int:
    return _DRAWN[sum(side > 1 for side in plan.topology.shape) > 2]


def _axis_times(plan: Plan) -> tuple[dict[str, float], set[str]]:
    """Returns the seconds that collectives take along each axis they use, and the axes with rings."""
    times: dict[str, float] = {}
    rings: set[str] = set()
    for each in plan.collectives or ():
        if each.route.hosts > 1:  # the time of this collective is spent between hosts
            continue
        for axis in each.route.axes:
            times[axis.name] = times.get(axis.name, 0.0) + each.seconds
            if axis.is_ring:
                rings.add(axis.name)
    return times, rings


def _flat(chip: Sequence[float]) -> tuple[float, float]:
    """Projects a chip's coordinates onto the plane of the figure."""
    x, y, z = chip
    return x + _SLANT[0] * z, y + _SLANT[1] * z
