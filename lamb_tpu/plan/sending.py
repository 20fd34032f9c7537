"""What a step's devices send, and whether computation or network takes most of the step."""

from typing import Any

from lamb_tpu.cost import traffic
from lamb_tpu.cost.hosts import HostNetwork
from lamb_tpu.cost.network import Network
from lamb_tpu.cost.timeline import Timeline


def as_json(schedule: Timeline | None, network: Network | None) -> dict[str, Any]:
    """Returns bytes, the limit, and the links of hosts; None stands for what is not known.

    Args:
      schedule: the expected times of a step.
      network: the network.
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
    """Returns what takes the larger part of a step.

    It is 'computation', 'network', or 'network between hosts' where these have slow links and most
    of the wait is for them.
    """
    if schedule.exposed <= schedule.compute:
        return "computation"
    if isinstance(network, HostNetwork):
        between = sum(event.exposed for event in schedule.events if _crosses(event, network))
        if 2 * between > schedule.exposed:
            return "network between hosts"
    return "network"


def link_bytes(schedule: Timeline, network: HostNetwork) -> float:
    """Returns the bytes that the busiest link of a host carries each way in a step."""
    return sum(
        event.collective.count * network.link_bytes(event.collective)
        for event in schedule.events
        if _crosses(event, network)
    )


def _crosses(event: Any, network: HostNetwork) -> bool:
    one = event.collective
    return network.route(one.groups, one.kind == "collective-permute").hosts > 1
