"""Tests hosts with one slow link each: compares bytes and times with values computed by hand."""

import math
from typing import Any

import pytest

from lamb_tpu.cost import hosts
from lamb_tpu.cost.hosts import HostNetwork
from lamb_tpu.cost.network import Constants, Network
from lamb_tpu.cost.topology import topology
from lamb_tpu.cost.traffic import Groups
from tests.cost.test_network import IDEAL, collective, places

V = 10**9
EVERYBODY = (tuple(range(32)),)
# Four hosts of 2 x 2 chips with two cores each.
V3 = topology("v3-32")


# Host of each device, in the order of `places`.
HOST_OF = [2 * (y // 2) + x // 2 for _, x, y, _ in places(V3)]
HOSTS = tuple(
    tuple(device for device, host in enumerate(HOST_OF) if host == number) for number in range(4)
)
# Each group has the k-th device of every host.
ACROSS = tuple(zip(*HOSTS, strict=True))


def fabric(gbps: float = 10.0) -> HostNetwork:
    return HostNetwork(V3, places(V3), HOST_OF, gbps)


@pytest.mark.parametrize(
    "kind, groups, expected",
    [
        ("all-reduce", EVERYBODY, 2 * 3 / 4),
        ("reduce-scatter", EVERYBODY, 3 / 4),
        ("all-gather", EVERYBODY, 32 * 3 / 4),
        ("all-to-all", EVERYBODY, 8 * 24 / 32),
        # Eight groups share the links.
        ("all-reduce", ACROSS, 8 * 2 * 3 / 4),
        ("all-gather", ACROSS, 8 * 4 * 3 / 4),
        ("all-to-all", ACROSS, 8 * 3 / 4),
        ("all-reduce", HOSTS, 0.0),
        ("all-to-all", HOSTS, 0.0),
        # Two devices of host 0 send to host 1, and one device of host 1 sends to host 0.
        (
            "collective-permute",
            (
                (HOSTS[0][0], HOSTS[1][0]),
                (HOSTS[0][1], HOSTS[1][1]),
                (HOSTS[1][0], HOSTS[0][0]),
                (HOSTS[2][0], HOSTS[2][1]),
            ),
            2.0,
        ),
        # A group with one device on host 0 and two devices on host 1.
        ("all-to-all", ((HOSTS[0][0], HOSTS[1][0], HOSTS[1][1]),), 2 / 3),
    ],
)
def test_bytes_of_a_link(kind: str, groups: Groups, expected: float) -> None:
    actual = fabric().link_bytes(collective(kind, groups, V))
    assert actual == pytest.approx(expected * V)


@pytest.mark.parametrize(
    "kind, groups, inside, steps",
    [
        # Within a host: 8 of 32 devices, on four chips in two lines.
        ("all-reduce", EVERYBODY, 2 * 3 / 4 * V / (2 * 82e9), 4),
        ("reduce-scatter", EVERYBODY, 3 / 4 * V / (2 * 82e9), 2),
        ("all-gather", EVERYBODY, 3 / 4 * 32 * V / (2 * 82e9), 2),
        ("all-to-all", EVERYBODY, 2 * V / 4 * 2 / 4 / 82e9, 1),
        # One device of each host: no traffic within a host.
        ("all-reduce", ACROSS, 0.0, 4),
        ("all-to-all", ACROSS, 0.0, 1),
    ],
)
def test_time_between_hosts(kind: str, groups: Groups, inside: float, steps: int) -> None:
    one = collective(kind, groups, V)
    link = fabric(10).link_bytes(one) / 1.25e9
    assert fabric(10).seconds(one, IDEAL) == pytest.approx(link + inside)
    assert fabric(40).seconds(one, IDEAL) == pytest.approx(link / 4 + inside)
    slow = Constants(1.0, 0.0, 7e-6, 0.5, 1e-3)
    assert fabric(10).seconds(one, slow) == pytest.approx(2 * link + inside + 7e-6 + steps * 1e-3)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all"])
def test_within_a_host_the_torus_stays(kind: str) -> None:
    one, constants = collective(kind, HOSTS, V), Constants(0.8, 1e-6, 5e-6, 0.7, 5e-5)
    torus = Network(V3, places(V3))
    assert fabric().seconds(one, constants) == torus.seconds(one, constants) > 0
    assert fabric().route(HOSTS, False) == torus.route(HOSTS, False)


def test_permutations() -> None:
    pair = ((HOSTS[0][0], HOSTS[1][0]), (HOSTS[2][0], HOSTS[2][7]))
    time = fabric().seconds(collective("collective-permute", pair, V), IDEAL)
    # The pair within a host crosses two links of the torus.
    assert time == pytest.approx(V / 1.25e9 + V / 82e9)
    alone = fabric().seconds(collective("collective-permute", pair[:1], V), IDEAL)
    assert alone == pytest.approx(V / 1.25e9)


def test_a_route_says_hosts() -> None:
    route = fabric().route(EVERYBODY, False)
    assert (route.hosts, route.cores, route.chips) == (4, 2, 4)
    assert route.describe() == "x line of 2, y line of 2, 4 hosts"
    assert fabric().route(ACROSS, False).describe() == "4 hosts"
    assert fabric().route(HOSTS, False).hosts == 1


def test_hosts_of_devices() -> None:
    class Device:
        def __init__(self, process: int, part: Any = None) -> None:
            self.process_index, self.slice_index = process, part

    assert hosts.hosts([Device(1), Device(0), Device(1)]) == [1, 0, 1]
    # Devices of the second slice follow those of the first, as in `network.places`.
    assert hosts.hosts([Device(0, 1), Device(0, 0), Device(1, 1)]) == [0, 1, 2]
    assert fabric().host_devices == 8 and math.isclose(fabric(40).gbps, 40)
