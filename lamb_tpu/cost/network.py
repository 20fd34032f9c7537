"""The network of a TPU slice, and a model with few constants for the time of a collective on it.

The chips of a slice form a grid with a link in each direction between neighbours; along some axes,
the links form rings. If the chips of a group differ along several axes, a collective uses these axes
simultaneously. If links carry B bytes per second in each direction, an all-gather of V bytes along a
ring of n chips takes (n - 1) V / (2 n B) seconds. Along a line it takes twice as long, because it can
use only one direction. A reduce-scatter takes as long as an all-gather, and an all-reduce is a
reduce-scatter followed by an all-gather. Groups that use the same links share their bandwidth. Slices
are connected by the data-centre network of the hosts. calibrated.py has the constants that plans use.
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
    """Bandwidths of the links of one TPU generation."""

    link: float  # bytes per second of a link between neighbours, in each direction
    # Bytes per second of a chip's share of the network between slices, in each direction.
    datacenter: float
    source: str  # source of the figures; figures from memory are marked 'recalled'


_BOOK = "jax-ml.github.io/scaling-book/tpus"
_CLOUD = "docs.cloud.google.com/tpu/docs"
# A page that gives a chip's bidirectional bandwidth counts each of its 4 or 6 links twice.
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
    """Constants of the model of a collective, fitted to measurements."""

    efficiency: float  # share of a link's bandwidth that a collective gets
    hop_seconds: float  # latency from a chip to its neighbour
    collective_seconds: float  # time to start and end a collective
    datacenter_efficiency: float  # share of the network between slices that a collective gets
    datacenter_seconds: float  # latency from one slice to another
    # Measured computation time of a program divided by the compiler's estimate.
    compute_factor: float = 1.0


class Validation(NamedTuple):
    """Accuracy of plans for runs that were excluded when the constants and intervals were fitted."""

    # (number of runs inside the interval, number of runs), with each program excluded in turn.
    programs: tuple[int, int]
    # TPU version -> the same numbers with all runs on that version excluded.
    generations: Mapping[str, tuple[int, int]]
    # Median and largest relative error of a run whose program is excluded.
    new_program: tuple[float, float]
    known_program: tuple[float, float]  # the same errors if other runs of it are in the fit

    def describe(self) -> str:
        """Returns the accuracy as text."""
        generations = ", ".join(
            f"{covered:,} of {number:,}{' runs' * (place == 0)} on {version}"
            for place, (version, (covered, number)) in enumerate(self.generations.items())
        )
        new, known = (
            f"{100 * median:.2g} % (at most {100 * largest:.2g} %)"
            for median, largest in (self.new_program, self.known_program)
        )
        return (
            f"the interval covered {self.programs[0]:,} of {self.programs[1]:,} runs if their program "
            "is left out of the fit"
            + f", and if their TPU generation is left out, {generations}"
            * bool(generations)
            + f"; median error {new} if the program is left out, {known} with other runs of it in "
            "the fit"
        )


class Bounds(NamedTuple):
    """Constants for the shortest, the expected and the longest time."""

    low: Constants
    middle: Constants
    high: Constants


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of one TPU generation, and the runs to which they are fitted."""

    each: Bounds
    fitted_to: str
    validation: Validation


@dataclasses.dataclass(frozen=True)
class Calibrations:
    """Fitted constants of all TPU generations."""

    known: Mapping[str, Bounds]  # TPU version -> constants, for the generations of the fitted runs
    unseen: Bounds  # constants of all other generations: an average, with wider bounds
    fitted_to: str
    validation: Validation  # accuracy for excluded runs

    def for_generation(self, version: str) -> Calibration:
        """Returns the constants of one generation."""
        if version in self.known:
            return Calibration(self.known[version], self.fitted_to, self.validation)
        fitted_to = f"{self.fitted_to}, none of them on {version}"
        return Calibration(self.unseen, fitted_to, self.validation)


# From the only profile in `jax-ml.github.io/scaling-book/sharding`: a large all-gather on TPU v5e
# takes 680 microseconds, and would take 560 at the full bandwidth of the links; a small all-gather
# over three hops takes 8 microseconds. The page also gives a microsecond per hop. The values between
# slices are guesses.
PROFILE = Constants(
    efficiency=0.82,
    hop_seconds=1e-6,
    collective_seconds=5e-6,
    datacenter_efficiency=0.7,
    datacenter_seconds=50e-6,
)


class Axis(NamedTuple):
    """An axis of the torus that a group of devices occupies."""

    name: str  # x, y or z
    length: int  # number of chips of the group along the axis
    stride: int  # distance between two adjacent chips of the group, in links
    is_ring: bool  # whether the links form a ring
    sharing: int  # number of groups that share a link

    @property
    def width(self) -> float:
        """Number of links that carry an all-gather at the same time, times a group's share of a link."""
        return (2 if self.is_ring else 1) / self.sharing

    @property
    def hops(self) -> int:
        """Number of links to the farthest chip."""
        return self.stride * (self.length // 2 if self.is_ring else self.length - 1)


class Route(NamedTuple):
    """The links that a collective's groups occupy."""

    chips: int  # chips of a group in one slice
    cores: int  # devices of a group on one chip
    slices: int  # slices of a group
    axes: tuple[Axis, ...]  # axes of the torus, for groups that are boxes of chips
    width: float  # number of links that carry an all-gather at the same time
    hops: int  # number of links to the farthest chip
    # Hosts of a group in a `hosts.HostNetwork`; the other attributes then describe one host.
    hosts: int = 1

    def describe(self) -> str:
        """Returns the axes as text, such as 'x ring of 16, y line of 8 (2 groups a link)'."""
        parts = [
            f"{axis.name} {'ring' if axis.is_ring else 'line'} of {axis.length}"
            + f" ({axis.sharing} groups a link)" * (axis.sharing > 1)
            for axis in self.axes
        ]
        if self.chips > 1 and not parts and self.hosts == 1:
            parts = [f"{self.chips} chips, routed via other chips"]
        if self.hosts > 1:
            parts.append(f"{self.hosts:,} hosts")
        if self.slices > 1:
            parts.append(f"{self.slices} slices")
        return ", ".join(parts) or "within a chip"


class Network:
    """The network between the devices of a program.

    Args:
      slice_: the slice.
      places: (slice, x, y, z) of each device's chip, in the order of the devices in the program.
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
        # `size` is also the size for a chip, whose devices first sum their data or gather their shards.
        passes = 2 if kind == "all-reduce" else 1
        time = constants.collective_seconds + passes * route.hops * constants.hop_seconds
        others = (route.chips - 1) / route.chips
        if kind == "collective-permute":
            time += size / (link * route.width) if route.hops else 0.0
        elif route.chips == 1:
            pass  # cores of one chip share its memory
        elif kind in ("all-to-all", "ragged-all-to-all"):
            # Half of the bytes cross the middle of an axis, over one or two links.
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
            # Each chip of a slice carries a share. If the cores of a chip are in different groups,
            # these groups share the bandwidth of the chip.
            share = passes * size * (route.slices - 1) / route.slices / route.chips
            share *= self._cores / route.cores
            time += share / between + passes * constants.datacenter_seconds
        return time

    def _route(self, groups: Groups, is_pairs: bool) -> Route:
        """Returns the route of groups of equal size."""
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
            axes.append(
                Axis(
                    name=AXES[axis],
                    length=len(values),
                    stride=stride,
                    is_ring=is_ring,
                    sharing=sharing,
                )
            )
        return Route(
            chips=chips,
            cores=cores,
            slices=counts[0],
            axes=tuple(axes),
            width=sum(axis.width for axis in axes),
            hops=sum(axis.hops for axis in axes),
        )

    def _sharing(self, members: np.ndarray, axis: int, is_ring: bool) -> int:
        """Returns the largest number of groups that use the same link of an axis."""
        load = np.zeros((self._slices, *self._sides), np.int64)
        for group in members:
            values = [np.unique(group[:, each]) for each in range(4)]
            along = values[axis + 1]
            links = np.arange(self._sides[axis]) if is_ring else np.arange(along[0], along[-1])
            values[axis + 1] = links
            load[np.ix_(*values)] += 1
        return int(load.max())

    def _routed(self, pairs: Sequence[tuple[int, int]], both_ways: bool) -> Route:
        """Returns the route of messages between pairs of devices, along x, then y, then z."""
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
        return Route(
            chips=2 if hops else 1,
            cores=1,
            slices=slices,
            axes=(),
            width=(2 if both_ways else 1) / most,
            hops=hops,
        )

    def _path(self, start: int, end: int) -> Iterator[tuple[int, ...]]:
        """Yields the links between two devices, each as slice, chip coordinates, axis and direction."""
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
    """Returns (slice, x, y, z) of each of JAX's TPU devices, as `Network` expects.

    Devices are sorted by slice, because a program numbers the devices of one slice, and the devices
    of further slices get the indices that follow.
    """
    found = []
    for device in devices:
        x, y, z = device.coords
        found.append((getattr(device, "slice_index", None) or 0, x, y, z))
    return sorted(found, key=lambda place: place[0])
