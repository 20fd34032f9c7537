"""Compares routes and times of collectives with hand-computed values and the only published profile."""

import itertools
import math

import pytest

from lamb_tpu.cost import network
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.network import (
    LINKS,
    PROFILE,
    Axis,
    Bounds,
    Calibrations,
    Constants,
    Network,
    Validation,
)
from lamb_tpu.cost.topology import GENERATIONS, Topology, topology
from lamb_tpu.cost.traffic import Collective, Groups

# Ideal links: full bandwidth, no latency.
IDEAL = Constants(1.0, 0.0, 0.0, 1.0, 0.0)


def places(slice_: Topology) -> list[tuple[int, ...]]:
    """Returns each device's (slice, x, y, z) in libtpu's order: cores vary fastest, then x."""
    x, y, z = (*slice_.shape, 1)[:3]
    return [
        (number, a, b, c)
        for number in range(slice_.slices)
        for c, b, a in itertools.product(range(z), range(y), range(x))
        for _ in range(slice_.generation.devices)
    ]


def torus(name: str) -> Network:
    return Network(topology(name), places(topology(name)))


def collective(kind: str, groups: Groups, num_bytes: int) -> Collective:
    return Collective(kind, groups, (Array("u8", (num_bytes,)),), 1)


def everybody(name: str) -> Groups:
    return (tuple(range(topology(name).num_devices)),)


def test_every_generation_has_links() -> None:
    assert LINKS.keys() == GENERATIONS.keys()
    for links in LINKS.values():
        assert 1e9 < links.datacenter < links.link < 1e12 and links.source


def test_a_pod_is_two_rings() -> None:
    fabric, groups = torus("v3-2048"), everybody("v3-2048")
    route = fabric.route(groups, False)
    assert route.axes == (Axis("x", 32, 1, True, 1), Axis("y", 32, 1, True, 1))
    assert (route.chips, route.cores, route.width, route.hops) == (1024, 2, 4, 32)
    assert route.describe() == "x ring of 32, y ring of 32"
    size = 10**9
    time = fabric.seconds(collective("all-reduce", groups, size), IDEAL)
    assert time == pytest.approx(2 * 1023 / 1024 * size / (4 * 82e9))
    # Half of the time is the reduce-scatter; the operand of an all-gather is a device's shard.
    half = fabric.seconds(collective("reduce-scatter", groups, size), IDEAL)
    gather = fabric.seconds(collective("all-gather", groups, size // 2000), IDEAL)
    assert half == pytest.approx(time / 2)
    assert gather == pytest.approx(half * 2048 / 2000)
    slow = Constants(0.5, 1e-6, 7e-6, 1.0, 0.0)
    assert fabric.seconds(collective("all-reduce", groups, size), slow) == pytest.approx(
        2 * time + 2 * 32e-6 + 7e-6
    )


def test_constants_of_a_generation() -> None:
    seen, unseen = Bounds(PROFILE, PROFILE, PROFILE), Bounds(IDEAL, PROFILE, PROFILE)
    validation = Validation((8, 9), {"v4": (3, 9)}, (0.15, 0.53), (0.015, 0.17))
    fitted = Calibrations({"v4": seen}, unseen, "9 runs", validation)
    old, new = fitted.for_generation("v4"), fitted.for_generation("v6e")
    assert old.each == seen and new.each == unseen
    assert old.fitted_to == "9 runs" and new.fitted_to == "9 runs, none of them on v6e"
    assert old.validation == new.validation == validation


def test_the_sentence_on_runs_left_out() -> None:
    errors = (0.1473, 0.528), (0.0153, 0.171)
    both = Validation((28, 31), {"v3": (21, 24), "v4": (7, 7)}, *errors)
    assert both.describe() == (
        "the interval covered 28 of 31 runs if their program is left out of the fit, and if their "
        "TPU generation is left out, 21 of 24 runs on v3, 7 of 7 on v4; median error 15 % (at most "
        "53 %) if the program is left out, 1.5 % (at most 17 %) with other runs of it in the fit"
    )
    one = Validation((28, 31), {}, *errors).describe()
    assert "left out of the fit; median error" in one


def test_a_generation_without_runs_has_a_wider_interval() -> None:
    def width(version: str) -> float:
        low, _, high = CALIBRATED.for_generation(version).each
        return high.compute_factor / low.compute_factor

    unseen = {width(version) for version in GENERATIONS if version not in ("v3", "v4")}
    assert len(unseen) == 1 and min(unseen) > 1.2 * width("v3")
    assert width("v3") == pytest.approx(width("v4"), rel=0.01)


def test_the_published_profile() -> None:
    """An all-gather along a line of 4 v5e chips takes 680 us in the profile; 560 us by bandwidth alone."""
    fabric = torus("v5e:8x4")
    groups = tuple(tuple(range(x, 32, 8)) for x in range(8))
    assert fabric.route(groups, False).axes == (Axis("y", 4, 1, False, 1),)
    large = collective("all-gather", groups, 2048 * 8192 * 2 // 4)
    bounds = CALIBRATED.for_generation("v5e").each
    spread = bounds.low, PROFILE, bounds.high
    low, middle, high = (fabric.seconds(large, each) for each in spread)
    assert low < middle < high and middle == pytest.approx(680e-6, rel=0.1)
    assert fabric.seconds(large, IDEAL) == pytest.approx(560e-6 * 45 / 50, rel=0.01)
    small = collective("all-gather", groups, 256 * 256 * 2 // 4)
    low, middle, high = (fabric.seconds(small, each) for each in spread)
    assert low < 8e-6 < high and middle == pytest.approx(8e-6, rel=0.3)


@pytest.mark.parametrize(
    "name, groups, axis",
    [
        # Rows of a ring, each on separate links.
        ("v5e-256", [range(16 * y, 16 * y + 16) for y in range(16)], Axis("x", 16, 1, True, 1)),
        # Every second chip: two groups on the same ring.
        (
            "v5e-256",
            [range(16 * y + k, 16 * y + 16, 2) for y in range(16) for k in range(2)],
            Axis("x", 8, 2, True, 2),
        ),
        # A section of a ring is a line.
        (
            "v5e-256",
            [range(16 * y + k, 16 * y + k + 8) for y in range(16) for k in (0, 8)],
            Axis("x", 8, 1, False, 1),
        ),
        # The cores of a chip are in separate groups.
        (
            "v3-2048",
            [range(64 * y + core, 64 * y + 64, 2) for y in range(32) for core in range(2)],
            Axis("x", 32, 1, True, 2),
        ),
        # A small slice has no ring.
        ("v5e-16", [range(x, 16, 4) for x in range(4)], Axis("y", 4, 1, False, 1)),
    ],
)
def test_groups_along_an_axis(name: str, groups: list[range], axis: Axis) -> None:
    route = torus(name).route(tuple(map(tuple, groups)), False)
    assert route.axes == (axis,)
    assert route.width == (2 if axis.is_ring else 1) / axis.sharing
    assert route.hops == (
        axis.stride * axis.length // 2 if axis.is_ring else axis.stride * (axis.length - 1)
    )


def test_within_a_chip() -> None:
    fabric = torus("v3-8")
    groups = tuple((core, core + 1) for core in range(0, 8, 2))
    assert fabric.route(groups, False).describe() == "within a chip"
    assert fabric.seconds(collective("all-reduce", groups, 10**9), IDEAL) == 0


@pytest.mark.parametrize("kind", ["all-to-all", "all-gather", "all-reduce", "reduce-scatter"])
def test_cores_of_a_chip_send_over_no_link(kind: str) -> None:
    pairs = tuple((core, core + 1) for core in range(0, 8, 2))
    late = Constants(1.0, 0.0, 3e-6, 1.0, 0.0)
    assert torus("v3-8").seconds(collective(kind, pairs, 10**6), late) == 3e-6


def test_a_group_that_is_no_box() -> None:
    fabric = torus("v5e-16")
    groups = ((0, 1, 5),)  # round a corner: from 5 back to 0 there are two links
    route = fabric.route(groups, False)
    assert (route.chips, route.axes, route.hops) == (3, (), 2)
    assert route.describe() == "3 chips, routed via other chips"
    time = fabric.seconds(collective("all-reduce", groups, 10**6), IDEAL)
    assert time == pytest.approx(2 * 2 / 3 * 10**6 / (2 * 50e9))


@pytest.mark.parametrize(
    "pairs, hops, load",
    [
        (tuple((i, (i + 1) % 16) for i in range(16)), 1, 1),  # round the ring
        (tuple((i, (i + 2) % 16) for i in range(16)), 2, 2),
        (((0, 15),), 1, 1),
        (((0, 17),), 2, 1),
        (((0, 0),), 0, 1),
    ],
)
def test_permutations(pairs: Groups, hops: int, load: int) -> None:
    fabric = torus("v5e-256")
    assert fabric.route(pairs, True).hops == hops
    time = fabric.seconds(collective("collective-permute", pairs, 10**6), IDEAL)
    assert time == pytest.approx(load * 10**6 / 50e9 if hops else 0)


def test_all_to_all() -> None:
    fabric, groups = torus("v5e-256"), everybody("v5e-256")
    time = fabric.seconds(collective("all-to-all", groups, 10**6), IDEAL)
    # Half of the 16 x 16 chips send half of their bytes to the other half of the chips, over the
    # links in the middle of an axis and over those that close the rings.
    assert time == pytest.approx(128 * 10**6 / 2 / (16 * 2 * 50e9))


def test_between_slices() -> None:
    one, two = torus("v5e-256"), torus("2xv5e-256")
    size = 10**9
    inside = one.seconds(collective("all-reduce", everybody("v5e-256"), size), IDEAL)
    whole = two.seconds(collective("all-reduce", everybody("2xv5e-256"), size), IDEAL)
    # Each chip of a slice sends half of its 256th of the bytes, twice.
    assert whole - inside == pytest.approx(2 * size / 2 / 256 / 3.125e9)
    # Cores in separate groups share the hosts' network.
    pairs = tuple((core, core + 8) for core in range(8))
    apart = torus("2xv3-8").seconds(collective("all-reduce", pairs, size), IDEAL)
    assert apart == pytest.approx(2 * 2 * size / 2 / 6.25e9)
    assert two.route(everybody("2xv5e-256"), False).describe() == (
        "x ring of 16, y ring of 16, 2 slices"
    )
    late = Constants(1.0, 0.0, 0.0, 1.0, 1e-3)
    assert two.seconds(
        collective("all-reduce", everybody("2xv5e-256"), size), late
    ) == pytest.approx(whole + 2e-3)


def test_places_of_devices() -> None:
    class Device:
        coords, slice_index = (3, 2, 1), 1

    class Lone:
        coords = (0, 1, 0)

    assert network.places([Device(), Lone()]) == [(0, 0, 1, 0), (1, 3, 2, 1)]
    assert len(set(places(topology("v3-32")))) == math.prod(topology("v3-32").shape)
