"""Bytes that a step sends, and the bottleneck of the step, for schedules that the tests construct."""

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
    actual = sending.as_json(schedule(1.0, PACKED, INSIDE), fabric(25))
    assert actual == {
        "sent_bytes": {"u8": 2 * 3100, "f32": 4 * 70},
        "limited_by": "computation",
        "network_gbps": 25,
        "host_devices": 8,
        "host_link_bytes": 2 * 8 * 3200 * 24 / 32,
    }


def test_limit() -> None:
    assert sending.limit(schedule(0.6, PACKED, INSIDE), fabric()) == "computation"
    # Most of the waiting time is within hosts.
    assert sending.limit(schedule(0.1, PACKED, INSIDE), fabric()) == "network"
    assert sending.limit(schedule(0.1, PACKED), fabric()) == "network between hosts"
    assert sending.limit(schedule(0.1, PACKED), None) == "network"


def test_unknown_schedule() -> None:
    assert set(sending.as_json(None, None).values()) == {None}
    actual = sending.as_json(schedule(1.0, INSIDE), None)
    assert actual["sent_bytes"] == {"f32": 280} and actual["network_gbps"] is None
