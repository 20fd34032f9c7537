"""The network of a TPU slice, and the time of a collective on it by a model of few constants.

The chips of a slice are a grid with a link each way between neighbours, which on some axes closes
to rings. A collective runs along the axes on which the chips of a group differ, on all of them at a
time. An all-gather of V bytes along a ring of n chips takes (n - 1) / n V / 2B with links of B
bytes a second each way; along a line, which has no second way round, twice as long. A
reduce-scatter takes as long as an all-gather, and an all-reduce is one and then the other. Groups
that use the same links share them. Between slices there is the data-centre network of the hosts.

Links are read in published pages, `LINKS`. How much of a link a collective gets, the time of a hop
and the fixed time of a collective are `Constants`; those of a plan are in calibrated.py.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lamb_tpu.cost.topology import Topology
from lamb_tpu.cost.traffic import Collective, Groups

AXES = "xyz"


class Links(NamedTuple):
    """The links between the chips of a generation.

    Attributes:
      link: bytes a second of a link between neighbours, each way.
      datacenter: bytes a second of a chip's share in the network between slices, each way.
      source: where the figures were read; what is recalled and not read is marked so.
    """

    link: float
    datacenter: float
    source: str


_BOOK = "jax-ml.github.io/scaling-book/tpus"
_CLOUD = "docs.cloud.google.com/tpu/docs"
# A page that gives a chip's bandwidth in both ways counts each of its 4 or 6 links twice.
LINKS = {
    "v2": Links(62e9, 6.25e9, "recalled: 496 Gbit/s a link, Jouppi et al., CACM 2020"),
    "v3": Links(
        82e9,
        6.25e9,
        f"recalled: 656 Gbit/s a link, Jouppi et al., CACM 2020; the book at {_BOOK} has 100 GB/s",
    ),
    "v4": Links(45e9, 6.25e9, _BOOK),
    "v5e": Links(50e9, 3.125e9, f"{_CLOUD}/v5e: 400 GB/s a chip of 4 links, 6.4 Tbit/s a pod"),
    "v5p": Links(100e9, 6.25e9, f"{_CLOUD}/v5p: 1,200 GB/s a chip of 6 links, 50 Gbit/s"),
    "v6e": Links(100e9, 12.5e9, f"{_CLOUD}/v6e: 800 GB/s a chip of 4 links, 25.6 Tbit/s a pod"),
    "tpu7x": Links(
        100e9, 12.5e9, f"{_CLOUD}/tpu7x: 1,200 GB/s a chip, of 6 links as v5p, 100 Gbit/s"
    ),
}


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants of the model of a collective, which measurements give.

    Attributes:
      efficiency: share of a link's bandwidth that a collective gets.
      hop_seconds: time from a chip to its neighbour, whatever the bytes.
      collective_seconds: time of starting and ending a collective.
      datacenter_efficiency: share of the network between slices that a collective gets.
      datacenter_seconds: time from a slice to another, whatever the bytes.
      compute_factor: measured time of a program's computation divided by the compiler's estimate.
    """

    efficiency: float
    hop_seconds: float
    collective_seconds: float
    datacenter_efficiency: float
    datacenter_seconds: float
    compute_factor: float = 1.0


class Validation(NamedTuple):
    """Accuracy of plans of runs that were left out of the fit and of the interval's parameters.

    Attributes:
      programs: number of runs inside the interval, and of all runs, with each program left out.
      generations: TPU version -> the same numbers with all runs on that version left out.
      new_program: median and largest relative error of a run whose program is left out.
      known_program: the same where other runs of the program are in the fit.
    """

    programs: tuple[int, int]
    generations: Mapping[str, tuple[int, int]]
    new_program: tuple[float, float]
    known_program: tuple[float, float]

    def describe(self) -> str:
        """Returns the numbers as text."""
        generations = ", ".join(
            f"{covered:,} of {number:,}{' runs' * (place == 0)} on {version}"
            for place, (version, (covered, number)) in enumerate(self.generations.items())
        )
        new, known = (
            f"{100 * median:.2g} % (at most {100 * largest:.2g} %)"
            for median, largest in (self.new_program, self.known_program)
        )
        return (
            f"the interval covered {self.programs[0]:,} of {self.programs[1]:,} runs of programs "
            "left out of the fit"
            + f", and of generations left out {generations}"
            * bool(generations)
            + f"; median error {new} for a program left out, {known} with other runs of the "
            "program in the fit"
        )


class Bounds(NamedTuple):
    """Constants of the shortest, the expected and the longest time."""

    low: Constants
    middle: Constants
    high: Constants


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants for one TPU generation, with the bounds of the interval for a new program.

    Attributes:
      each: the constants, ascending in time.
      fitted_to: the runs to which they were fitted.
      validation: accuracy for runs left out.
    """

    each: Bounds
    fitted_to: str
    validation: Validation


@dataclasses.dataclass(frozen=True)
class Calibrations:
    """Fitted constants of all TPU generations.

    Attributes:
      known: TPU version -> constants, for the generations of the fitted runs.
      unseen: constants of any other generation: those of an average one, and wider bounds.
      fitted_to: the runs to which they were fitted.
      validation: accuracy for runs left out.
    """

    known: Mapping[str, Bounds]
    unseen: Bounds
    fitted_to: str
    validation: Validation

    def for_generation(self, version: str) -> Calibration:
        """Returns the constants of one generation."""
        if version in self.known:
            return Calibration(self.known[version], self.fitted_to, self.validation)
        fitted_to = f"{self.fitted_to}, none of them on {version}"
        return Calibration(self.unseen, fitted_to, self.validation)


# Of the one profile in `jax-ml.github.io/scaling-book/sharding`: an all-gather on TPU v5e in 680
# microseconds where the links alone would take 560, and a small one of three hops in 8; it also has
# the microsecond a hop. Between slices it is a guess.
PROFILE = Constants(0.82, 1e-6, 5e-6, 0.7, 50e-6)


class Axis(NamedTuple):
    """An axis of the torus that a group of devices occupies.

    Attributes:
      name: x, y or z.
      length: number of chips of the group along it.
      stride: distance between two of them, in links.
      is_ring: whether the links close to a ring.
      sharing: number of groups that use the same link.
    """

    name: str
    length: int
    stride: int
    is_ring: bool
    sharing: int

    @property
    def width(self) -> float:
        """Links that carry an all-gather at a time; a group's share of them."""
        return (2 if self.is_ring else 1) / self.sharing

    @property
    def hops(self) -> int:
        """Links that the bytes of the farthest chip pass."""
        return self.stride * (self.length // 2 if self.is_ring else self.length - 1)


class Route(NamedTuple):
    """The links that a collective's groups occupy.

    Attributes:
      chips: chips of a group in one slice.
      cores: devices of a group on one chip.
      slices: slices of a group.
      axes: axes of the torus, for groups that are boxes of chips.
      width: links that carry an all-gather at a time.
      hops: links that the bytes of the farthest chip pass.
      hosts: hosts of a group, where a slow network lies between hosts and the rest is of one host,
        see `hosts.HostNetwork`; 1 otherwise.
    """

    chips: int
    cores: int
    slices: int
    axes: tuple[Axis, ...]
    width: float
    hops: int
    hosts: int = 1

    def describe(self) -> str:
        """Returns the axes as text, such as 'x ring of 16, y line of 8 (2 groups a link)'."""
        parts = [
            f"{axis.name} {'ring' if axis.is_ring else 'line'} of {axis.length}"
            + f" ({axis.sharing} groups a link)" * (axis.sharing > 1)
            for axis in self.axes
        ]
        if self.chips > 1 and not parts and self.hosts == 1:
            parts = [f"{self.chips} chips, by way of others"]
        if self.hosts > 1:
            parts.append(f"{self.hosts:,} hosts")
        if self.slices > 1:
            parts.append(f"{self.slices} slices")
        return ", ".join(parts) or "within a chip"


class Network:
    """The network that a program's devices have between them.

    Args:
      slice_: the slice.
      places: slice and chip coordinates of each device, (devices, 4), in the program's order.
    """

    def __init__(self, slice_: Topology, places: Sequence[Sequence[int]]) -> None:
        self.links = LINKS[slice_.version]
        self._places = np.asarray(places, np.int64)
        self._wrap = slice_.wrap
        self._sides = tuple((*slice_.shape, 1, 1)[:3])
        self._slices, self._cores = slice_.slices, slice_.generation.devices
        self.route = functools.cache(self._route)

    def seconds(self, collective: Collective, constants: Constants) -> float:
        """Returns the time of one execution of a collective."""
        kind, size = collective.kind, float(collective.operand_bytes)
        route = self.route(collective.groups, kind == "collective-permute")
        link = self.links.link * constants.efficiency
        between = self.links.datacenter * constants.datacenter_efficiency
        if kind == "all-gather":
            size *= collective.group_size
        # Bytes of a chip: devices of a chip first add up, or bring a part each.
        passes = 2 if kind == "all-reduce" else 1
        time = constants.collective_seconds + passes * route.hops * constants.hop_seconds
        others = (route.chips - 1) / route.chips
        if kind == "collective-permute":
            time += size / (link * route.width) if route.hops else 0.0
        elif route.chips == 1:
            pass  # cores of one chip share its memory
        elif kind in ("all-to-all", "ragged-all-to-all"):
            # Half of the bytes cross the middle of an axis, which has one or two links.
            time += max(
                (
                    route.cores
                    * size
                    * axis.length
                    * axis.sharing
                    / (8 if axis.is_ring else 4)
                    / link
                    for axis in route.axes
                ),
                default=route.cores * size * others / (link * route.width),
            )
        else:
            time += passes * others * size / (link * route.width)
        if route.slices > 1:
            # A slice's chips carry a part each; cores in different groups share their chip's.
            share = passes * size * (route.slices - 1) / route.slices / route.chips
            share *= self._cores / route.cores
            time += share / between + passes * constants.datacenter_seconds
        return time

    def _route(self, groups: Groups, is_pairs: bool) -> Route:
        """Returns the route of groups of equal sizes."""
        if is_pairs:
            return self._routed([(start, end) for start, end in groups if start != end], False)
        members = self._places[np.asarray(groups)]  # (groups, devices of a group, 4)
        first = [np.unique(members[0, :, axis]) for axis in range(4)]
        counts = [len(values) for values in first]
        chips = len(np.unique(members[0], axis=0)) // counts[0]
        cores = members.shape[1] // (chips * counts[0])
        if chips != counts[1] * counts[2] * counts[3]:
            rings = [pair for group in groups for pair in zip(group, (*group[1:], group[0]))]
            routed = self._routed(rings, True)
            hops = routed.hops * (chips // 2)
            return routed._replace(chips=chips, cores=cores, slices=counts[0], hops=hops)
        axes = []
        for axis in range(3):
            values = first[axis + 1]
            if len(values) < 2:
                continue
            stride = int(values[1] - values[0])
            is_ring = self._wrap[axis] and stride * len(values) == self._sides[axis]
            sharing = self._sharing(members, axis, is_ring)
            axes.append(Axis(AXES[axis], len(values), stride, is_ring, sharing))
        return Route(
            chips,
            cores,
            counts[0],
            tuple(axes),
            sum(axis.width for axis in axes),
            sum(axis.hops for axis in axes),
        )

    def _sharing(self, members: np.ndarray, axis: int, is_ring: bool) -> int:
        """Returns the largest number of groups that use a link of an axis."""
        load = np.zeros((self._slices, *self._sides), np.int64)
        for group in members:
            values = [np.unique(group[:, each]) for each in range(4)]
            along = values[axis + 1]
            links = np.arange(self._sides[axis]) if is_ring else np.arange(along[0], along[-1])
            values[axis + 1] = links
            load[np.ix_(*values)] += 1
        return int(load.max())

    def _routed(self, pairs: Sequence[tuple[int, int]], both_ways: bool) -> Route:
        """Returns the route of messages from device to device, along x, then y, then z."""
        load: dict[tuple[int, ...], int] = {}
        hops, slices = 0, 1
        for start, end in pairs:
            passed = list(self._path(start, end))
            hops = max(hops, len(passed))
            if self._places[start, 0] != self._places[end, 0]:
                slices = 2
            for link in passed:
                load[link] = load.get(link, 0) + 1
        most = max(load.values(), default=1)
        return Route(2 if hops else 1, 1, slices, (), (2 if both_ways else 1) / most, hops)

    def _path(self, start: int, end: int) -> Iterator[tuple[int, ...]]:
        """Yields the links between two devices: slice, coordinates of a chip, axis, direction."""
        at, goal = list(self._places[start]), self._places[end]
        for axis in range(3):
            side = self._sides[axis]
            distance = int(goal[axis + 1] - at[axis + 1])
            if self._wrap[axis] and abs(distance) > side // 2:
                distance -= side if distance > 0 else -side
            step = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                yield (*at, axis, step)
                at[axis + 1] = (at[axis + 1] + step) % side


def places(devices: Iterable[Any]) -> list[tuple[int, int, int, int]]:
    """Returns slice and chip coordinates of JAX's TPU devices, as `Network` takes them.

    A program is that of one slice, so the devices of each slice follow those of the slice before.
    """
    found = []
    for device in devices:
        x, y, z = device.coords
        found.append((getattr(device, "slice_index", None) or 0, x, y, z))
    return sorted(found, key=lambda place: place[0])
