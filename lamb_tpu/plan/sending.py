"""Bytes that the devices send in a step, and whether computation or network limits the step."""

from typing import Any

from lamb_tpu.cost import traffic
from lamb_tpu.cost.hosts import HostNetwork
from lamb_tpu.cost.network import Network
from lamb_tpu.cost.timeline import Timeline


def as_json(schedule: Timeline | None, network: Network | None) -> dict[str, Any]:
    """Returns the bytes sent, the bottleneck and the links between hosts as a dict of JSON values.

    A value is None if it is unknown. `schedule` has the expected times of a step.
    """
    links = network if isinstance(network, HostNetwork) else None
    return {
        "sent_bytes": schedule
        and traffic.sent_by_dtype(event.collective for event in schedule.events),
        "limited_by": schedule and limit(schedule, network),
        "network_gbps": links and links.gbps,
        "host_devices": links and links.host_devices,
        "host_link_bytes": schedule and links and link_bytes(schedule, links),
    }


def limit(schedule: Timeline, network: Network | None) -> str:
    """Returns the bottleneck of a step: 'computation', 'network' or 'network between hosts'.

    The bottleneck is the network between hosts if each host has one link and collectives between
    hosts cause most of the waiting time.
    """
    if schedule.exposed <= schedule.compute:
        return "computation"
    if isinstance(network, HostNetwork):
        between = sum(event.exposed for event in schedule.events if _crosses(event, network))
        if 2 * between > schedule.exposed:
            return "network between hosts"
    return "network"


def link_bytes(schedule: Timeline, network: HostNetwork) -> float:
    """Returns the bytes that the busiest host link carries in one direction in a step."""
    return sum(
        event.collective.count * network.link_bytes(event.collective)
        for event in schedule.events
        if _crosses(event, network)
    )


def _crosses(event: Any, network: HostNetwork) -> bool:
    collective = event.collective
    return network.route(collective.groups, collective.kind == "collective-permute").hosts > 1
