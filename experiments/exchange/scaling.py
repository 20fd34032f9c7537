"""Times of a step at any number of devices, extrapolated from two compiled programs.

If n devices exchange gradients, the operand of a collective has a + b / n bytes, because the operand is
the full gradient or a device's shard. Two programs determine a and b, and a third program checks a and b.
The exchange takes c + d n cycles, because some exchanges add up the values of n devices.
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
from experiments.plan.rows import load_rows
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.hosts import HostNetwork
from lamb_tpu.cost.network import Network
from lamb_tpu.cost.topology import topology
from lamb_tpu.cost.traffic import Collective, Groups

Row = Mapping[str, Any]
SavedRows = Mapping[str, Row]
FITTED = ("v3-32", "v3-128")  # the slices of the two fitted programs
CHECKED = "v5e-16"  # the slice of the third program
CONSTANTS = CALIBRATED.for_generation("v3").each.middle
DEVICES = (8, 32, 128, 512, 2048)
# Gb/s of a host's link; None is the torus.
NETWORKS = {"TPU torus": None, "100 Gb/s": 100.0, "40 Gb/s": 40.0, "25 Gb/s": 25.0, "10 Gb/s": 10.0}


class Collectives(NamedTuple):
    """Collectives of one type; on n devices, their operands have `fixed + cut / n` bytes in total."""

    kind: str
    among: str
    dtype: str
    number: int
    fixed: float
    cut: float

    def operand_bytes(self, count: int) -> float:
        """Returns the total bytes of the operands if `count` devices exchange gradients."""
        return self.fixed + self.cut / count


class Law(NamedTuple):
    """The scaling law of an exchange.

    Attributes:
      collectives: the collectives of the exchange.
      cycles: (c, d); the exchange takes c + d n cycles.
      inner: number of devices in each group that first sums gradients; 1 if there are no groups.
    """

    collectives: tuple[Collectives, ...]
    cycles: tuple[float, float]
    inner: int


class Time(NamedTuple):
    """Predicted seconds of a step.

    Attributes:
      compute: seconds of the step without its exchange.
      packing: seconds of the exchange's computation.
      network: seconds of the exchange's collectives.
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
    """Fits the scaling law of an exchange to two of its programs.

    Args:
      rows: the row for the smaller slice, then the row for the larger slice.
    """
    inner = rows[0]["inner"]
    counts = [row["devices"] // inner for row in rows]
    tables = [{tuple(each[:3]): (each[3], each[4]) for each in row["collectives"]} for row in rows]
    collectives = []
    for key in sorted({*tables[0], *tables[1]}):
        (_, first), (number, second) = (table.get(key, (0, 0)) for table in tables)
        # Collectives within a host are the same on every slice.
        if key[1] == "inner" or abs(first - second) <= 0.02 * second:
            cut = 0.0
        else:
            cut = (first - second) / (1 / counts[0] - 1 / counts[1])
        collectives.append(Collectives(*key, max(1, number), second - cut / counts[1], cut))
    slope = max(0.0, (rows[1]["cycles"] - rows[0]["cycles"]) / (counts[1] - counts[0]))
    return Law(tuple(collectives), (rows[1]["cycles"] - slope * counts[1], slope), inner)


def law_of(saved: SavedRows, model: str, method: str, inner: int = 1) -> Law | None:
    """Returns the scaling law of an exchange; None if one of its programs is not compiled."""
    rows = [saved.get(Case(model, method, name, inner).key) for name in FITTED]
    compiled = [row for row in rows if row is not None]
    return law(compiled) if len(compiled) == len(FITTED) else None


def sent_bytes(scaling_law: Law, devices: int) -> float:
    """Returns the bytes that a device sends, counted as in `traffic.Collective.sent_bytes`."""
    total = 0.0
    for one in scaling_law.collectives:
        count = devices // scaling_law.inner
        members = {"inner": scaling_law.inner, "outer": count, "all": devices}[one.among]
        total += one.operand_bytes(count) * sent_share(one.kind, members)
    return total


@functools.cache
def step_seconds(model: str) -> float | None:
    """Returns the compiler's estimate of a step's computation time; None if ../plan/rows.json lacks it."""
    row = load_rows().get(MODELS[model].step.key(STEP_SLICE))
    return None if row is None else float(row["compute"])


def time(
    saved: SavedRows, model: str, method: str, devices: int, gbps: float | None
) -> Time | None:
    """Returns the time of a step; gradients are first summed within hosts if that is faster.

    Args:
      saved: rows by key.
      model, method: keys of `MODELS` and `METHODS`.
      devices: number of devices.
      gbps: Gb/s of a host's link; None stands for the torus.

    Returns:
      The time; None if a required program is not compiled.
    """
    step = step_seconds(model)
    plain = law_of(saved, model, "float32")
    times = []
    for inner in (1, HOST_DEVICES):
        each = law_of(saved, model, method, inner)
        # On a single host, no exchange follows the sum within the host.
        if step is None or plain is None or each is None or devices <= inner:
            continue
        count = devices // inner
        # Skip a sparse exchange that would send as many values as the array has, or more.
        if METHODS[method].get("ratio", 0.0) * count >= 1:
            continue
        clock = topology(FITTED[0]).generation.clock / CONSTANTS.compute_factor
        # The cycles of the step include those of the float32 exchange.
        method_cycles = each.cycles[0] + each.cycles[1] * count
        packing = max(0.0, method_cycles - plain.cycles[0] - plain.cycles[1] * devices) / clock
        network = sum(
            one.number
            * _fabric(devices, gbps).seconds(
                Collective(
                    one.kind,
                    groups(devices, one.among, one.kind),
                    (Array("u8", (round(one.operand_bytes(count) / one.number),)),),
                    1,
                ),
                CONSTANTS,
            )
            for one in each.collectives
        )
        times.append(Time(CONSTANTS.compute_factor * step, packing, network, inner > 1))
    return min(times, key=lambda each: each.seconds, default=None)


def best(saved: SavedRows, model: str, devices: int, gbps: float | None) -> dict[str, Time]:
    """Returns the step time with each compiled method, the shortest first."""
    times = {method: time(saved, model, method, devices, gbps) for method in METHODS}
    known = {method: each for method, each in times.items() if each is not None}
    return dict(sorted(known.items(), key=lambda item: item[1].seconds))


def off_by(saved: SavedRows) -> dict[tuple[str, str], float]:
    """Returns the relative error of the predicted bytes of the third program, by model and method."""
    errors = {}
    for model in MODELS:
        for method in METHODS:
            row, each = saved.get(Case(model, method, CHECKED).key), law_of(saved, model, method)
            if row is not None and each is not None:
                sent = sum(row["sent"].values())
                errors[model, method] = sent_bytes(each, row["devices"]) / sent - 1
    return errors


@functools.cache
def coordinates(devices: int) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the coordinates of the devices of a TPU v3 slice, host by host."""
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

    A permutation has pairs: each device sends to the next device of its group.
    """
    result: list[tuple[int, ...]] = [tuple(range(devices))]
    if among != "all":
        hosts = [range(first, first + HOST_DEVICES) for first in range(0, devices, HOST_DEVICES)]
        result = list(map(tuple, hosts if among == "inner" else zip(*hosts, strict=True)))
    if kind == "collective-permute":
        return tuple(pair for group in result for pair in itertools.pairwise((*group, group[0])))
    return tuple(result)


@functools.cache
def _fabric(devices: int, gbps: float | None) -> Network:
    slice_, at = topology(f"v3-{devices}"), coordinates(devices)
    if gbps is None:
        return Network(slice_, at)
    return HostNetwork(slice_, at, [device // HOST_DEVICES for device in range(devices)], gbps)
