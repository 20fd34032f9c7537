"""Minimum traffic and memory of a step, and the table of the measurements."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench.distribution_cell import Cell

DIFFERENCE = 1e-6
EXCESS = 1.05  # bound of the sent bytes, as a multiple of the minimum
GRADIENT_SUMS = 4
MEMORY = 1.01  # bound of the allocated bytes, as a multiple of the computed bytes
_WIDTHS = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4
_COUNT_BYTES = 4  # LAMB's count of updates
_STATES = {"replicated": "replicated", "zero1": "ZeRO-1", "fsdp": "FSDP"}
_SUMS = ("all-reduce", "reduce-scatter")
_LETTERS = {"difference": "a", "of_least": "b", "sums": "c", "of_computed": "d"}
Shapes = Mapping[str, Sequence[int]]
Line = dict[str, Any]


def is_split(name: str, shape: Sequence[int], devices: int, state: str) -> bool:
    """Returns whether a parameter's moments, and under FSDP the parameter itself, are sharded."""
    divides = any(size % devices == 0 for size in shape)
    return divides and (state == "zero1" or (state == "fsdp" and name.endswith("kernel")))


def least_bytes(shapes: Shapes, devices: int, state: str, gradient_dtype: str) -> float:
    """Returns the bytes that each device must send in an update for gradients and parameters.

    With n devices, an all-reduce sends 2 (n - 1) / n of the gradient's bytes. If each device keeps a
    shard of the sum, it sends (n - 1) / n of the gradient's bytes, and (n - 1) / n of the parameters'
    bytes to gather the updated parameters.
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
        shards = devices if is_split(name, shape, devices, state) else 1
        param_shards = 1 if state == "zero1" else shards
        total += _FLOAT32 * math.prod(shape) * (1 / param_shards + 2 / shards)
    return total


def sorted_messages(line: Line) -> tuple[list[Line], list[Line]]:
    """Returns the operations that carry gradients or parameters, and the other operations.

    An operation belongs to the first group if one of its arrays has as many values as a kernel. Under
    shard_map, where kernels are sent in buckets and activations are not sent, the array must have at
    least as many values as the smallest kernel.
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
    """Returns the figures outside their bounds; too few bytes held or sent are also out of bounds."""
    numbers = figures(line)
    bounds = {
        "difference": (0, DIFFERENCE),
        # Vectors, 1 % of the parameters, may be sent with the other operations.
        "of_least": (0.95, EXCESS),
        "sums": (0, GRADIENT_SUMS),
        "of_computed": (1 / MEMORY, MEMORY),
    }
    return {name for name, (low, high) in bounds.items() if not low <= numbers[name] <= high}


def table(lines: Sequence[Line]) -> str:
    """Returns the measurements as Markdown; a figure outside its bound is bold, with a letter."""
    rows = [
        "| devices | processes | state | backend | gradients | difference | gradients and "
        "parameters: operations, MB | MB sent | MB sent / minimum | other operations, kB | MB held | "
        "MB computed | first update after, s |",
        "|--:|--:|---|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for line in lines:
        cell, numbers = _cell(line), figures(line)
        large, small = sorted_messages(line)
        types = ", ".join(
            _marked(f"{count} {kind} {size / 1e6:.3f}", "sums" if kind in _SUMS else "", line)
            for kind, (count, size) in _by_kind(large).items()
        )
        others = ", ".join(
            f"{count} {kind} {size / 1e3:.1f}" for kind, (count, size) in _by_kind(small).items()
        )
        sent = sum(one["sent_bytes"] for one in large)
        microbatches = f" in {cell.microbatches} microbatches" if cell.microbatches > 1 else ""
        of_least = f"{numbers['of_least']:.3f}" if cell.devices > 1 else "-"
        computed = computed_memory(line["shapes"], cell.devices, cell.state)
        held = _marked(f"{line['held_bytes'] / 1e6:.3f}", "of_computed", line)
        apart = _marked(f"{numbers['difference']:.2e}", "difference", line)
        rows.append(
            f"| {cell.devices} | {cell.processes} | {_STATES[cell.state]} | {cell.backend} | "
            f"{cell.gradient_dtype}{microbatches} | {apart} | {types or '-'} | "
            f"{sent / 1e6:.3f} | {_marked(of_least, 'of_least', line)} | "
            f"{others or '-'} | {held} | {computed / 1e6:.3f} | {line['seconds']:.1f} |"
        )
    return "\n".join(rows)


def notes(lines: Sequence[Line]) -> list[str]:
    """Returns explanations of the figures that miss their bounds."""
    sentences = [
        *_difference_notes([line for line in lines if "difference" in missed(line)], lines),
        *_traffic_notes([line for line in lines if "of_least" in missed(line)]),
    ]
    for line in lines:
        if "sums" in missed(line):
            sentences.append(
                f"(c) {_cell(line).name}: {figures(line)['sums']:.0f} operations sum gradients; "
                f"the bound is {GRADIENT_SUMS}."
            )
        if "of_computed" in missed(line):
            sentences.append(
                f"(d) {_cell(line).name}: a device holds {figures(line)['of_computed']:.3f} times the "
                "computed bytes."
            )
    return sentences or ["Every figure is within its bound."]


def _difference_notes(marked: Sequence[Line], lines: Sequence[Line]) -> list[str]:
    sentences = []
    narrow = [line for line in marked if _cell(line).gradient_dtype != "float32"]
    if narrow:
        sentences.append(
            f"(a) Gradients sent in bfloat16 have 8 significant bits: after the same number of updates the "
            f"parameters differ from the first row's by up to {max(map(_apart, narrow)):.1e}, and the last "
            f"loss is "
            f"{min(line['losses'][1] for line in narrow):.4f} to "
            f"{max(line['losses'][1] for line in narrow):.4f} instead of "
            f"{lines[0]['losses'][1]:.4f}. The bound is meant for float32 gradients."
        )
    exact = [line for line in marked if _cell(line).gradient_dtype == "float32"]
    order = [_apart(line) for line in lines if _cell(line).microbatches > 1]
    if exact:
        most = max(map(_apart, exact))
        names = sorted({max(x["differences"], key=x["differences"].get) for x in exact})
        sentence = (
            f"(a) The difference is above {DIFFERENCE:g} in {len(exact)} float32 row(s), at most "
            f"{most:.2e}, in {' and '.join(names)}."
        )
        if order:
            sentence += (
                f" On one device, adding the same gradients in another order makes a difference of "
                f"{max(order):.2e}: "
                + (
                    "LAMB divides by each gradient's magnitude, so where a gradient is little more than "
                    "rounding error, the order of additions matters."
                    if most <= 5 * max(order)
                    else "the order of additions alone does not explain this."
                )
            )
        sentences.append(sentence)
    return sentences


def _traffic_notes(marked: Sequence[Line]) -> list[str]:
    sentences = []
    for state, backend in dict.fromkeys((_cell(x).state, _cell(x).backend) for x in marked):
        group = [x for x in marked if (_cell(x).state, _cell(x).backend) == (state, backend)]
        most = max(group, key=lambda line: (figures(line)["of_least"], _cell(line).devices))
        devices = _cell(most).devices
        types, others = map(_by_kind, sorted_messages(most))
        half = (
            (devices - 1)
            / devices
            * sum(
                _FLOAT32 * math.prod(shape)
                for name, shape in most["shapes"].items()
                if is_split(name, shape, devices, state)
            )
        )
        sentence = (
            f"(b) {_STATES[state]} under {backend} sends up to {figures(most)['of_least']:.3f} times "
            f"the minimum: with {devices} devices, "
            + " and ".join(f"{size / 1e6:.3f} MB by {kind}" for kind, (_, size) in types.items())
            + "."
        )
        if half and "reduce-scatter" not in types and "all-reduce" in types:
            sentence += (
                " Under jit the compiler chooses the collectives: it sums full gradients with all-reduces, "
                "and each device keeps its shard; reduce-scatters would send "
                f"{half / 1e6:.3f} MB."
            )
        if half and types.get("all-gather", (0, 0))[1] > EXCESS * half:
            sentence += (
                " Parameters are gathered more than once; a single gather would send "
                f"{half / 1e6:.3f} MB."
            )
        moved = sum(size for kind, (_, size) in others.items() if kind != "all-reduce")
        if state == "fsdp" and moved:
            sentence += f" It also exchanges {moved / 1e6:.3f} MB of activations."
        if backend == "shard_map" or state == "replicated":
            sentence += " This setting promises the minimum traffic."
        else:
            sentence += (
                " The jit backend promises the same parameters and memory, not the minimum traffic."
            )
        sentences.append(sentence)
    return sentences


def _apart(line: Line) -> float:
    return figures(line)["difference"]


def _marked(text: str, figure: str, line: Line) -> str:
    return f"**{text}** ({_LETTERS[figure]})" if figure in missed(line) else text


def _by_kind(messages: Sequence[Line]) -> dict[str, tuple[int, int]]:
    """Returns the number of operations and the sent bytes by type."""
    totals: dict[str, tuple[int, int]] = {}
    for one in messages:
        count, size = totals.get(one["kind"], (0, 0))
        totals[one["kind"]] = count + one["count"], size + one["sent_bytes"]
    return totals


def _cell(line: Line) -> Cell:
    return Cell(*line["cell"])
