"""Facts of the machine."""

import os

import pytest

from lamb_tpu.cluster import host


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process")
def test_cores_are_those_that_this_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    assert host.num_cores() == len(mine)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert host.num_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert host.num_cores() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert host.num_cores() == 1
