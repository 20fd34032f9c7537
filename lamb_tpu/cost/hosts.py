"""A slow network between hosts in the place of the torus, and the time of a collective on it.

The devices of one host keep the links of the slice between them. Hosts have nothing but one link
each, such as Ethernet, which all of its devices share. A collective among devices of several hosts
first adds up, or brings together, what is within a host, so that each link carries the least that
the kind of collective needs. Its time is the sum of

- the same collective among the devices of a host, on the links of the slice,
- the bytes of the busiest link, divided by its rate,
- and the steps between hosts, each a fixed time.

With h hosts, d devices of a group on each, groups of n devices and V bytes of a device's operand,
the link of a host carries each way, of each group that has devices there:

| kind | bytes | steps |
|---|---|---|
| reduce-scatter | (h - 1) / h V | log2 h |
| all-gather | (h - 1) / h n V | log2 h |
| all-reduce | 2 (h - 1) / h V | 2 log2 h |
| all-to-all | d (n - d) / n V | 1 |
| collective-permute | V for each pair of which one device is there | 1 |

The bytes of the first three are those of a ring through the hosts and of halving and doubling,
which has these steps. Of an all-to-all nothing adds up within a host, so each device's bytes count.
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
    """The network of hosts that have one slow link each.

    Args:
      slice_: the slice, whose links connect the devices of a host.
      places: slice and chip coordinates of each device, see `Network`.
      hosts: number of the host of each device, in the same order.
      gbps: rate of a host's link each way, in 10^9 bits a second.

    Attributes:
      gbps: the rate.
      host_devices: devices of a host.
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
        # Messages of an all-to-all and of a permutation are under way at a time.
        at_once = collective.kind in (*_TO_ALL, _PERMUTE)
        steps = 1 if at_once else passes * math.ceil(math.log2(hosts))
        return (
            self._within(collective, constants)
            + self.link_bytes(collective) / rate
            + steps * constants.datacenter_seconds
        )

    def link_bytes(self, collective: Collective) -> float:
        """Returns the bytes that the busiest link of a host carries each way, for one execution."""
        kind = collective.kind
        what = kind if kind == _PERMUTE else "to all" if kind in _TO_ALL else "sum"
        size = float(collective.operand_bytes) * self._loads(collective.groups, what)
        if kind == "all-gather":
            size *= collective.group_size
        return size * (2 if kind == "all-reduce" else 1)

    def _within(self, collective: Collective, constants: Constants) -> float:
        """Returns the time of a collective's part within hosts."""
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
                size *= collective.group_size // most  # what the hosts have brought together
            elif kind in _TO_ALL:
                size = size * most // collective.group_size
        if not groups:
            return constants.collective_seconds
        inner = collective._replace(groups=groups, arrays=(Array("u8", (size,)),))
        return super().seconds(inner, constants)

    def _parts(self, group: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns a group's devices by host."""
        found: dict[int, list[int]] = {}
        for device in group:
            found.setdefault(int(self._hosts[device]), []).append(device)
        return [tuple(part) for part in found.values()]

    def _load(self, groups: Groups, what: str) -> float:
        """Returns what the busiest link carries each way, in a device's bytes; sums go one way."""
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
            return Route(2, 1, 1, (), 1.0, 1, hosts)
        parts = [part for group in groups for part in self._parts(group)]
        most = max(map(len, parts))
        inner = super()._route(tuple(part for part in parts if len(part) == most), False)
        return inner._replace(hosts=hosts)


def hosts(devices: Iterable[Any]) -> list[int]:
    """Returns the number of the host of each of JAX's devices, in the order of `network.places`."""
    found = [
        (getattr(device, "slice_index", None) or 0, device.process_index) for device in devices
    ]
    numbers = {host: number for number, host in enumerate(sorted(set(found)))}
    return [numbers[host] for host in sorted(found, key=lambda host: host[0])]
