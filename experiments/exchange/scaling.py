"""Times of a step at any number of devices, from programs of a few numbers.

What a collective's operand has depends on the number of devices n that exchange as a + b / n: the
whole gradient, or the part of each device. Two programs give a and b, and a third checks them. So
do the cycles of the exchange, as c + d n, because some exchanges add up what n devices send.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.exchange.programs import (
    HOST_DEVICES,
    METHODS,
    MODELS,
    STEP_SLICE,
    Case,
    sent_share,
)
from experiments.plan.rows import load_kept
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.hosts import HostNetwork
from lamb_tpu.cost.network import Network
from lamb_tpu.cost.topology import topology
from lamb_tpu.cost.traffic import Collective, Groups

Row = Mapping[str, Any]
Kept = Mapping[str, Row]
FITTED = ("v3-32", "v3-128")  # the slices of the two programs
CHECKED = "v5e-16"  # that of the third
CONSTANTS = CALIBRATED.for_generation("v3").each.middle
DEVICES = (8, 32, 128, 512, 2048)
# Gb/s of a host's link; None: the torus.
NETWORKS = {"TPU torus": None, "100 Gb/s": 100.0, "40 Gb/s": 40.0, "25 Gb/s": 25.0, "10 Gb/s": 10.0}


class Part(NamedTuple):
    """Collectives of one kind, with operands of `whole + cut / n` bytes together."""

    kind: str
    among: str
    dtype: str
    number: int
    whole: float
    cut: float

    def operand_bytes(self, count: int) -> float:
        """Bytes of the operands among `count` devices."""
        return self.whole + self.cut / count


class Law(NamedTuple):
    """An exchange at any number of devices.

    Attributes:
      parts: its collectives.
      cycles: (c, d) of its cycles c + d n.
      inner: devices within which gradients are summed first.
    """

    parts: tuple[Part, ...]
    cycles: tuple[float, float]
    inner: int


class Time(NamedTuple):
    """Predicted seconds of a step.

    Attributes:
      compute: of the step without its exchange.
      packing: computation of the exchange.
      network: of its collectives.
      is_within: whether gradients are first summed within hosts.
    """

    compute: float
    packing: float
    network: float
    is_within: bool

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.compute + self.packing + self.network


def law(rows: Sequence[Row]) -> Law:
    """Returns the law through two programs of an exchange.

    Args:
      rows: of the smaller slice and of the larger one.
    """
    inner = rows[0]["inner"]
    counts = [row["devices"] // inner for row in rows]
    tables = [{tuple(each[:3]): (each[3], each[4]) for each in row["collectives"]} for row in rows]
    parts = []
    for key in sorted({*tables[0], *tables[1]}):
        (_, first), (number, second) = (table.get(key, (0, 0)) for table in tables)
        # Those within a host are the same on every slice.
        if key[1] == "inner" or abs(first - second) <= 0.02 * second:
            cut = 0.0
        else:
            cut = (first - second) / (1 / counts[0] - 1 / counts[1])
        parts.append(Part(*key, max(1, number), second - cut / counts[1], cut))
    slope = max(0.0, (rows[1]["cycles"] - rows[0]["cycles"]) / (counts[1] - counts[0]))
    return Law(tuple(parts), (rows[1]["cycles"] - slope * counts[1], slope), inner)


def law_of(kept: Kept, model: str, method: str, inner: int = 1) -> Law | None:
    """Returns the law of an exchange; None if a program is not compiled."""
    rows = [kept.get(Case(model, method, name, inner).key) for name in FITTED]
    found = [row for row in rows if row is not None]
    return law(found) if len(found) == len(FITTED) else None


def sent_bytes(found: Law, devices: int) -> float:
    """Returns the bytes that a device sends, as `traffic.Collective.sent_bytes` counts them."""
    total = 0.0
    for part in found.parts:
        count = devices // found.inner
        members = {"inner": found.inner, "outer": count, "all": devices}[part.among]
        total += part.operand_bytes(count) * sent_share(part.kind, members)
    return total


@functools.cache
def step_seconds(model: str) -> float | None:
    """Returns the computation of a step by the compiler; None if it is not in ../plan/rows.json."""
    row = load_kept().get(MODELS[model].step.key(STEP_SLICE))
    return None if row is None else float(row["compute"])


def time(kept: Kept, model: str, method: str, devices: int, gbps: float | None) -> Time | None:
    """Returns the time of a step, with gradients summed within hosts first where it is shorter.

    Args:
      kept: rows by key.
      model, method: keys of `MODELS` and `METHODS`.
      devices: number of devices.
      gbps: of a host's link; None: the torus.

    Returns:
      The time; None if a program is not compiled.
    """
    step = step_seconds(model)
    plain = law_of(kept, model, "float32")
    found = []
    for inner in (1, HOST_DEVICES):
        each = law_of(kept, model, method, inner)
        # A single host has nothing to sum first.
        if step is None or plain is None or each is None or devices <= inner:
            continue
        count = devices // inner
        # As many indices as values: then a sparse exchange sums whole vectors in their place.
        if METHODS[method].get("ratio", 0.0) * count >= 1:
            continue
        clock = topology(FITTED[0]).generation.clock / CONSTANTS.compute_factor
        # The step has the cycles of float32's exchange in it.
        own = each.cycles[0] + each.cycles[1] * count
        packing = max(0.0, own - plain.cycles[0] - plain.cycles[1] * devices) / clock
        network = sum(
            part.number
            * _fabric(devices, gbps).seconds(
                Collective(
                    part.kind,
                    groups(devices, part.among, part.kind),
                    (Array("u8", (round(part.operand_bytes(count) / part.number),)),),
                    1,
                ),
                CONSTANTS,
            )
            for part in each.parts
        )
        found.append(Time(CONSTANTS.compute_factor * step, packing, network, inner > 1))
    return min(found, key=lambda each: each.seconds, default=None)


def best(kept: Kept, model: str, devices: int, gbps: float | None) -> dict[str, Time]:
    """Returns the times of the methods that are compiled, the shortest first."""
    found = {method: time(kept, model, method, devices, gbps) for method in METHODS}
    known = {method: each for method, each in found.items() if each is not None}
    return dict(sorted(known.items(), key=lambda item: item[1].seconds))


def off_by(kept: Kept) -> dict[tuple[str, str], float]:
    """Returns by model and method how far the law's bytes are from the third program's."""
    found = {}
    for model in MODELS:
        for method in METHODS:
            row, each = kept.get(Case(model, method, CHECKED).key), law_of(kept, model, method)
            if row is not None and each is not None:
                sent = sum(row["sent"].values())
                found[model, method] = sent_bytes(each, row["devices"]) / sent - 1
    return found


@functools.cache
def places(devices: int) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the coordinates of a slice of TPU v3, host by host."""
    width, height, _ = topology(f"v3-{devices}").shape
    return tuple(
        (0, x + i, y + j, 0)
        for y in range(0, height, 2)
        for x in range(0, width, 2)
        for j in range(2)
        for i in range(2)
        for _ in range(2)  # cores of a chip
    )


@functools.cache
def groups(devices: int, among: str, kind: str = "") -> Groups:
    """Returns the groups of a collective, see `programs.summed`.

    Those of a permutation are pairs: each device sends to the next one of its group.
    """
    found: list[tuple[int, ...]] = [tuple(range(devices))]
    if among != "all":
        hosts = [range(first, first + HOST_DEVICES) for first in range(0, devices, HOST_DEVICES)]
        found = list(map(tuple, hosts if among == "inner" else zip(*hosts, strict=True)))
    if kind == "collective-permute":
        return tuple(pair for group in found for pair in itertools.pairwise((*group, group[0])))
    return tuple(found)


@functools.cache
def _fabric(devices: int, gbps: float | None) -> Network:
    slice_, at = topology(f"v3-{devices}"), places(devices)
    if gbps is None:
        return Network(slice_, at)
    return HostNetwork(slice_, at, [device // HOST_DEVICES for device in range(devices)], gbps)
