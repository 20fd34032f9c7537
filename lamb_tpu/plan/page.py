"""A plan as one HTML page that needs no network: pictures are within it, for light and dark."""

import itertools
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
from lamb_tpu.files import writing
from lamb_tpu.plan.report import Plan, decision, size_text
from lamb_tpu.plan.totals import span_text

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_DEAREST = 10  # kernels on the page
_DRAWN = (8, 4)  # chips of a side in the picture of a torus with two and with three axes
_COLORS = [style.OPTIMIZERS[name].color for name in ("lamb", "lars", "adamw")]  # x, y and z
# Where the third axis goes in the picture.
_SLANT = (0.35, 0.22)


class Part(NamedTuple):
    """A plan as its page shows it.

    Attributes:
      name: the phase; '' for the only one.
      plan: the plan.
      facts: (name, value) pairs.
      pictures: (caption, SVG) pairs.
      kernels: the most expensive kernels, each with its milliseconds and share of the estimate.
    """

    name: str
    plan: Plan
    facts: list[tuple[str, str]]
    pictures: list[tuple[str, str]]
    kernels: list[tuple[Operation, float, float]]


def check_page(path: str) -> pathlib.Path:
    """Returns the path of a page.

    Raises:
      UserError: it is no .html file in a folder that exists.
    """
    page = pathlib.Path(path)
    if page.suffix != ".html" or not page.parent.is_dir():
        raise UserError(f"--html {path} must be a .html file in a folder that exists")
    return page


def write_page(plans: Sequence[tuple[str, Plan]], path: pathlib.Path) -> None:
    """Writes the page of a config's plans.

    Args:
      plans: name of the phase and its plan, in order; the name is '' for a config without phases.
      path: the file.

    Raises:
      UserError: the file cannot be written.
    """
    text = render(
        "plan.html.j2",
        parts=[_part(name, plan) for name, plan in plans],
        title=plans[0][1].topology.name,
        decision=decision([plan for _, plan in plans]),
        size_text=size_text,
    )
    with writing.checked(path, "--html"):
        path.write_text(text, "utf-8")


def render(template: str, **values: Any) -> str:
    """Returns a page from a template of the folder `templates`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _part(name: str, plan: Plan) -> Part:
    slice_ = plan.topology
    facts = [
        ("slice", f"{slice_.name}: {slice_.num_chips:,} chips on {plan.hosts:,} hosts"),
        ("mesh", ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())),
        ("batch", f"{plan.batch_size:,}"),
        *([("optimizer", plan.leaves)] if plan.leaves else []),
    ]
    if plan.step_seconds:
        low, middle, high = plan.step_seconds
        facts.append(("a step", f"{1e3 * middle:.3g} ms ({1e3 * low:.3g} to {1e3 * high:.3g})"))
    if total := plan.totals:
        facts.append(("the run", span_text(total.seconds[0], total.seconds[2])))
    facts += plan.sending
    facts.append(("left out", plan.left_out))
    facts.append(("fitted to", plan.calibration.fitted_to))
    facts.append(("validated", plan.calibration.validation.describe()))
    pictures, kernels = list[tuple[str, str]](), list[tuple[Operation, float, float]]()
    if plan.memory is not None:
        caption = f"Memory of a device, by kind. The line is the {size_text(_usable(plan))} that "
        pictures.append((f"{caption}programs may use.", svg(_memory(plan))))
    if plan.cycles and plan.program:
        found = operations.operations(hlo.parse(plan.program))
        clock, whole = slice_.generation.clock, sum(each.cycles for each in found)
        kernels = [
            (each, 1e3 * each.cycles / clock, each.cycles / whole) for each in found[:_DEAREST]
        ]
        kinds = {kind: 1e3 * cycles / clock for kind, cycles in operations.by_kind(found).items()}
        caption = "Time of a step, by kind of operation, as the compiler estimates it"
        tail = "; the network with its interval." if plan.times else "."
        pictures.append((caption + tail, svg(_times(plan, kinds))))
    if plan.collectives:
        pictures.append(
            (
                f"Links of a slice, at most {_most(plan)} chips of a side. The wider a line, the "
                "longer collectives use that axis in a step; dots close a ring.",
                svg(_torus(plan)),
            )
        )
    return Part(name, plan, facts, pictures, kernels)


def _usable(plan: Plan) -> float:
    return plan.topology.generation.usable


def svg(figure: Figure) -> str:
    """Returns a figure as an element of a page: without the head of a file."""
    text = style.svg(figure)
    # A size in points would not shrink on a phone.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*pt"',
        r"\1",
        re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", text[text.index("<svg") :], count=1),
        count=1,
    )


def _bars(
    values: Mapping[str, float],
    title: str,
    unit: str,
    span: tuple[float, float] | None = None,
    limit: float | None = None,
) -> Figure:
    """Plots a bar for each value; `span` is the interval of the last one."""
    figure = style.figure(7.5, 0.9 + 0.36 * len(values))
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
        limit=_usable(plan) / gib,
    )


def _times(plan: Plan, kinds: Mapping[str, float]) -> Figure:
    title = f"{plan.topology.name}: time of a step"
    if plan.times is None:
        return _bars(kinds, title, "ms")
    low, middle, high = (1e3 * each.exposed for each in plan.times)
    return _bars({**kinds, "waiting for the network": middle}, title, "ms", span=(low, high))


def _torus(plan: Plan) -> Figure:
    """Plots chips and links of a slice; the width of a link is the time along its axis."""
    times, rings = _axis_times(plan)
    sides = tuple(min(side, _most(plan)) for side in (*plan.topology.shape, 1, 1)[:3])
    longest = max(times.values(), default=0.0) or 1.0
    figure = style.figure(7.5, 1.2 + 2.4 * min(1.0, (sides[1] + _SLANT[1] * sides[2]) / sides[0]))
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
                # The link that closes a ring leaves the picture.
                stub = [float(place) for place in chip]
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
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _most(plan: Plan) -> int:
    return _DRAWN[sum(side > 1 for side in plan.topology.shape) > 2]


def _axis_times(plan: Plan) -> tuple[dict[str, float], set[str]]:
    """Returns the seconds of collectives along each axis that has any, and the axes with rings."""
    times: dict[str, float] = {}
    rings: set[str] = set()
    for each in plan.collectives or ():
        if each.route.hosts > 1:  # which takes its time between hosts
            continue
        for axis in each.route.axes:
            times[axis.name] = times.get(axis.name, 0.0) + each.seconds
            if axis.is_ring:
                rings.add(axis.name)
    return times, rings


def _flat(chip: Sequence[float]) -> tuple[float, float]:
    """Returns where a chip is drawn."""
    x, y, z = chip
    return x + _SLANT[0] * z, y + _SLANT[1] * z
