"""A slow network between hosts in place of the torus, and the time of a collective on it.

The devices of a host use the links of the slice among themselves. Each host has a single link to
the other hosts, such as Ethernet, which all its devices share. An all-reduce, reduce-scatter or
all-gather first sums or gathers within each host, so that links carry fewer bytes. README.md
lists the bytes and the steps between hosts for each type of collective: the bytes are those of the
ring algorithm, and the steps those of recursive halving and doubling.
"""

import collections
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.network import Constants, Network, Route
from lamb_tpu.cost.topology import Topology
from lamb_tpu.cost.traffic import Collective, Groups

_TO_ALL = ("all-to-all", "ragged-all-to-all")
_PERMUTE = "collective-permute"


class HostNetwork(Network):
    """A network of hosts with one slow link each.

    Args:
      slice_, places: see `Network`; the slice's links connect the devices of a host.
      hosts: index of the host of each device, in the order of `places`.
      gbps: rate of a host's link in each direction, in 10^9 bits per second.

    Attributes:
      host_devices: number of devices of a host.
    """

    def __init__(
        self, slice_: Topology, places: Sequence[Sequence[int]], hosts: Sequence[int], gbps: float
    ) -> None:
        super().__init__(slice_, places)
        self.gbps = gbps
        self.host_devices = max(collections.Counter(hosts).values())
        self._hosts = np.unique(np.asarray(hosts), return_inverse=True)[1]
        self._loads = functools.cache(self._load)

    def seconds(self, collective: Collective, constants: Constants) -> float:
        hosts = self.route(collective.groups, collective.kind == _PERMUTE).hosts
        if hosts == 1:
            return super().seconds(collective, constants)
        rate = self.gbps * 1e9 / 8 * constants.datacenter_efficiency
        passes = 2 if collective.kind == "all-reduce" else 1
        # All messages of an all-to-all or of a permutation are sent at the same time.
        at_once = collective.kind in (*_TO_ALL, _PERMUTE)
        steps = 1 if at_once else passes * math.ceil(math.log2(hosts))
        return (
            self._within(collective, constants)
            + self.link_bytes(collective) / rate
            + steps * constants.datacenter_seconds
        )

    def link_bytes(self, collective: Collective) -> float:
        """Returns the bytes that the busiest host link carries in one direction in one execution."""
        kind = collective.kind
        what = kind if kind == _PERMUTE else "to all" if kind in _TO_ALL else "sum"
        size = float(collective.operand_bytes) * self._loads(collective.groups, what)
        if kind == "all-gather":
            size *= collective.group_size
        return size * (2 if kind == "all-reduce" else 1)

    def _within(self, collective: Collective, constants: Constants) -> float:
        """Returns the time that a collective takes within hosts."""
        kind, size = collective.kind, collective.operand_bytes
        if kind == _PERMUTE:
            groups = tuple(
                pair for pair in collective.groups if self._hosts[pair[0]] == self._hosts[pair[1]]
            )
        else:
            parts = [part for group in collective.groups for part in self._parts(group)]
            most = max(map(len, parts))
            groups = tuple(part for part in parts if len(part) == most > 1)
            if kind == "all-gather" and groups:
                size *= collective.group_size // most  # bytes gathered from all hosts
            elif kind in _TO_ALL:
                size = size * most // collective.group_size
        if not groups:
            return constants.collective_seconds
        inner = collective._replace(groups=groups, arrays=(Array("u8", (size,)),))
        return super().seconds(inner, constants)

    def _parts(self, group: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the devices of a group, grouped by host."""
        found: dict[int, list[int]] = {}
        for device in group:
            found.setdefault(int(self._hosts[device]), []).append(device)
        return [tuple(part) for part in found.values()]

    def _load(self, groups: Groups, what: str) -> float:
        """Returns the load of the busiest link in one direction, in units of a device's operand."""
        sent: dict[int, float] = collections.defaultdict(float)
        received: dict[int, float] = collections.defaultdict(float)
        for group in groups:
            if what == _PERMUTE:
                start, end = (int(self._hosts[device]) for device in group)
                if start != end:
                    sent[start] += 1
                    received[end] += 1
                continue
            parts, count = self._parts(group), len(group)
            for part in parts:
                host = int(self._hosts[part[0]])
                share = len(part) * (count - len(part)) / count
                sent[host] += share if what == "to all" else (len(parts) - 1) / len(parts)
        return max([*sent.values(), *received.values()], default=0.0)

    def _route(self, groups: Groups, is_pairs: bool) -> Route:
        hosts = max(len({int(self._hosts[device]) for device in group}) for group in groups)
        if hosts == 1:
            return super()._route(groups, is_pairs)
        if is_pairs:
            return Route(chips=2, cores=1, slices=1, axes=(), width=1.0, hops=1, hosts=hosts)
        parts = [part for group in groups for part in self._parts(group)]
        most = max(map(len, parts))
        inner = super()._route(tuple(part for part in parts if len(part) == most), False)
        return inner._replace(hosts=hosts)


def hosts(devices: Iterable[Any]) -> list[int]:
    """Returns the host index of each JAX device, in the order of `network.places`."""
    found = [
        (getattr(device, "slice_index", None) or 0, device.process_index) for device in devices
    ]
    numbers = {host: number for number, host in enumerate(sorted(set(found)))}
    return [numbers[host] for host in sorted(found, key=lambda host: host[0])]
