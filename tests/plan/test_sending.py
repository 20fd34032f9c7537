"""What a step sends, and what limits it; nothing is compiled."""

from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.timeline import Event, Timeline
from lamb_tpu.cost.traffic import Collective
from lamb_tpu.plan import sending
from tests.cost.test_hosts import EVERYBODY, HOSTS, fabric


def event(groups: tuple, dtype: str, size: int, exposed: float, count: int = 1) -> Event:
    one = Collective("all-to-all", groups, (Array(dtype, (size,)),), count)
    return Event("x", one, "", "", exposed, exposed)


PACKED = event(EVERYBODY, "u8", 3200, 0.2, count=2)
INSIDE = event(HOSTS, "f32", 80, 0.3)


def schedule(compute: float, *events: Event) -> Timeline:
    return Timeline(compute, sum(each.exposed for each in events), events)


def test_bytes_by_dtype() -> None:
    found = sending.as_json(schedule(1.0, PACKED, INSIDE), fabric(25))
    assert found == {
        "sent_bytes": {"u8": 2 * 3100, "f32": 4 * 70},
        "limited_by": "computation",
        "network_gbps": 25,
        "host_devices": 8,
        "host_link_bytes": 2 * 8 * 3200 * 24 / 32,
    }


def test_what_limits() -> None:
    assert sending.limit(schedule(0.6, PACKED, INSIDE), fabric()) == "computation"
    # More of the wait is within hosts.
    assert sending.limit(schedule(0.1, PACKED, INSIDE), fabric()) == "network"
    assert sending.limit(schedule(0.1, PACKED), fabric()) == "network between hosts"
    assert sending.limit(schedule(0.1, PACKED), None) == "network"


def test_nothing_is_known() -> None:
    assert set(sending.as_json(None, None).values()) == {None}
    found = sending.as_json(schedule(1.0, INSIDE), None)
    assert found["sent_bytes"] == {"f32": 280} and found["network_gbps"] is None
