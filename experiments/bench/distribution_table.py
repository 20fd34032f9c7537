"""Lower bounds of a step's traffic and memory, and the table of the measurements."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench.distribution_cell import Cell

DIFFERENCE = 1e-6
EXCESS = 1.05  # bound of the sent bytes, as a multiple of the least
GRADIENT_SUMS = 4
MEMORY = 1.01  # bound of the held bytes, as a multiple of the computed ones
_WIDTHS = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4
_COUNT_BYTES = 4  # LAMB's count of updates
_STATES = {"replicated": "replicated", "zero1": "ZeRO-1", "fsdp": "FSDP"}
_SUMS = ("all-reduce", "reduce-scatter")
_LETTERS = {"difference": "a", "of_least": "b", "sums": "c", "of_computed": "d"}
Shapes = Mapping[str, Sequence[int]]
Line = dict[str, Any]


def is_split(name: str, shape: Sequence[int], devices: int, state: str) -> bool:
    """Returns whether a parameter's moments, and under FSDP itself, are split over the devices."""
    divides = any(size % devices == 0 for size in shape)
    return divides and (state == "zero1" or (state == "fsdp" and name.endswith("kernel")))


def least_bytes(shapes: Shapes, devices: int, state: str, gradient_dtype: str) -> float:
    """Returns the bytes that each device must send in an update for gradients and parameters.

    With n devices it is 2 (n - 1) / n of the gradient's bytes if all get its sum. If each keeps a
    part of the sum, it is (n - 1) / n of them, and (n - 1) / n of the parameters' bytes to gather
    those again.
    """
    gradient, total = _WIDTHS[gradient_dtype], 0
    for name, shape in shapes.items():
        split = is_split(name, shape, devices, state)
        total += math.prod(shape) * (gradient + (_FLOAT32 if split else gradient))
    return total * (devices - 1) / devices


def computed_memory(shapes: Shapes, devices: int, state: str) -> float:
    """Returns the bytes of parameters and LAMB's two moments on each device."""
    total = _COUNT_BYTES
    for name, shape in shapes.items():
        part = devices if is_split(name, shape, devices, state) else 1
        whole = 1 if state == "zero1" else part
        total += _FLOAT32 * math.prod(shape) * (1 / whole + 2 / part)
    return total


def sorted_messages(line: Line) -> tuple[list[Line], list[Line]]:
    """Returns the operations that carry gradients or parameters, and the others.

    An operation belongs to the first if one of its arrays has as many values as a kernel; under
    shard_map, at least as many as the smallest kernel, because kernels are sent in buckets there
    and activations are not sent. It counts with everything that was combined with it.
    """
    kernels = [math.prod(s) for name, s in line["shapes"].items() if name.endswith("kernel")]
    named = _cell(line).backend == "shard_map"

    def is_large(one: Line) -> bool:
        return any(size in kernels or (named and size >= min(kernels)) for size in one["sizes"])

    messages = line["messages"]
    return [x for x in messages if is_large(x)], [x for x in messages if not is_large(x)]


def figures(line: Line) -> dict[str, float]:
    """Returns the figures that have a bound: difference, of_least, sums and of_computed."""
    cell, (large, _) = _cell(line), sorted_messages(line)
    least = least_bytes(line["shapes"], cell.devices, cell.state, cell.gradient_dtype)
    computed = computed_memory(line["shapes"], cell.devices, cell.state)
    return {
        "difference": max(line["differences"].values()),
        "of_least": sum(one["sent_bytes"] for one in large) / least if least else 1.0,
        "sums": sum(one["count"] for one in large if one["kind"] in _SUMS),
        "of_computed": line["held_bytes"] / computed,
    }


def missed(line: Line) -> set[str]:
    """The figures that fail their bound; too few bytes held or sent fail as well."""
    found = figures(line)
    bounds = {
        "difference": (0, DIFFERENCE),
        # Vectors, 1 % of the parameters, may go with the others.
        "of_least": (0.95, EXCESS),
        "sums": (0, GRADIENT_SUMS),
        "of_computed": (1 / MEMORY, MEMORY),
    }
    return {name for name, (low, high) in bounds.items() if not low <= found[name] <= high}


def table(lines: Sequence[Line]) -> str:
    """The measurements as Markdown; a figure that fails its bound is bold and has a letter."""
    rows = [
        "| devices | processes | state | backend | gradients | difference | gradients and "
        "parameters: operations, MB | MB sent | of the least | others: operations, kB | MB held | "
        "computed | first update after, s |",
        "|--:|--:|---|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for line in lines:
        cell, found = _cell(line), figures(line)
        large, small = sorted_messages(line)
        kinds = ", ".join(
            _marked(f"{count} {kind} {size / 1e6:.3f}", "sums" if kind in _SUMS else "", line)
            for kind, (count, size) in _by_kind(large).items()
        )
        others = ", ".join(
            f"{count} {kind} {size / 1e3:.1f}" for kind, (count, size) in _by_kind(small).items()
        )
        sent = sum(one["sent_bytes"] for one in large)
        microbatches = f" in {cell.microbatches} microbatches" if cell.microbatches > 1 else ""
        of_least = f"{found['of_least']:.3f}" if cell.devices > 1 else "-"
        computed = computed_memory(line["shapes"], cell.devices, cell.state)
        held = _marked(f"{line['held_bytes'] / 1e6:.3f}", "of_computed", line)
        apart = _marked(f"{found['difference']:.2e}", "difference", line)
        rows.append(
            f"| {cell.devices} | {cell.processes} | {_STATES[cell.state]} | {cell.backend} | "
            f"{cell.gradient_dtype}{microbatches} | {apart} | {kinds or '-'} | "
            f"{sent / 1e6:.3f} | {_marked(of_least, 'of_least', line)} | "
            f"{others or '-'} | {held} | {computed / 1e6:.3f} | {line['seconds']:.1f} |"
        )
    return "\n".join(rows)


def notes(lines: Sequence[Line]) -> list[str]:
    """A sentence or two about every figure that fails its bound."""
    found = [
        *_difference_notes([line for line in lines if "difference" in missed(line)], lines),
        *_traffic_notes([line for line in lines if "of_least" in missed(line)]),
    ]
    for line in lines:
        if "sums" in missed(line):
            found.append(
                f"(c) {_cell(line).name}: {figures(line)['sums']:.0f} operations sum gradients, "
                f"the bound is {GRADIENT_SUMS}."
            )
        if "of_computed" in missed(line):
            found.append(
                f"(d) {_cell(line).name}: {figures(line)['of_computed']:.3f} of the computed bytes "
                "lie on a device."
            )
    return found or ["Every figure keeps its bound."]


def _difference_notes(marked: Sequence[Line], lines: Sequence[Line]) -> list[str]:
    found = []
    narrow = [line for line in marked if _cell(line).gradient_dtype != "float32"]
    if narrow:
        found.append(
            f"(a) Gradients sent in bfloat16 keep 8 bits; after as many updates the parameters "
            f"differ by up to {max(map(_apart, narrow)):.1e}, and the last loss is "
            f"{min(line['losses'][1] for line in narrow):.4f} to "
            f"{max(line['losses'][1] for line in narrow):.4f} instead of "
            f"{lines[0]['losses'][1]:.4f}. The bound is one for float32."
        )
    exact = [line for line in marked if _cell(line).gradient_dtype == "float32"]
    order = [_apart(line) for line in lines if _cell(line).microbatches > 1]
    if exact:
        most = max(map(_apart, exact))
        names = sorted({max(x["differences"], key=x["differences"].get) for x in exact})
        told = (
            f"(a) Above {DIFFERENCE:g} in {len(exact)} row(s) in float32, at most {most:.2e}, in "
            f"{' and '.join(names)}."
        )
        if order:
            told += (
                f" The one device that adds the same gradients in another order differs by "
                f"{max(order):.2e}: "
                + (
                    "LAMB divides by each gradient's own size, so where a gradient is hardly more "
                    "than rounding, the order of additions is seen."
                    if most <= 5 * max(order)
                    else "the order of additions alone does not explain this."
                )
            )
        found.append(told)
    return found


def _traffic_notes(marked: Sequence[Line]) -> list[str]:
    found = []
    for state, backend in dict.fromkeys((_cell(x).state, _cell(x).backend) for x in marked):
        group = [x for x in marked if (_cell(x).state, _cell(x).backend) == (state, backend)]
        most = max(group, key=lambda line: (figures(line)["of_least"], _cell(line).devices))
        devices = _cell(most).devices
        kinds, others = map(_by_kind, sorted_messages(most))
        half = (
            (devices - 1)
            / devices
            * sum(
                _FLOAT32 * math.prod(shape)
                for name, shape in most["shapes"].items()
                if is_split(name, shape, devices, state)
            )
        )
        told = (
            f"(b) {_STATES[state]} under {backend} sends up to {figures(most)['of_least']:.3f} of "
            f"the least: at {devices} devices "
            + ", ".join(f"{size / 1e6:.3f} MB by {kind}" for kind, (_, size) in kinds.items())
            + "."
        )
        if half and "reduce-scatter" not in kinds and "all-reduce" in kinds:
            told += (
                " The compiler, which has placed them, sums whole gradients with all-reduces and "
                f"lets each device keep its part; a reduce-scatter would send {half / 1e6:.3f} MB."
            )
        if half and kinds.get("all-gather", (0, 0))[1] > EXCESS * half:
            told += f" Parameters are gathered more than once; once would be {half / 1e6:.3f} MB."
        moved = sum(size for kind, (_, size) in others.items() if kind != "all-reduce")
        if state == "fsdp" and moved:
            told += f" The {moved / 1e6:.3f} MB of activations that it exchanges come on top."
        if backend == "shard_map" or state == "replicated":
            told += " This placement promises the least."
        else:
            told += " This backend promises the same parameters and memory, not the least traffic."
        found.append(told)
    return found


def _apart(line: Line) -> float:
    return figures(line)["difference"]


def _marked(text: str, figure: str, line: Line) -> str:
    return f"**{text}** ({_LETTERS[figure]})" if figure in missed(line) else text


def _by_kind(messages: Sequence[Line]) -> dict[str, tuple[int, int]]:
    """Operations and bytes of each kind."""
    totals: dict[str, tuple[int, int]] = {}
    for one in messages:
        count, size = totals.get(one["kind"], (0, 0))
        totals[one["kind"]] = count + one["count"], size + one["sent_bytes"]
    return totals


def _cell(line: Line) -> Cell:
    return Cell(*line["cell"])
