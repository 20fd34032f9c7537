"""The wall time of a run that is resumed."""

import time

import pytest

from lamb_tpu.store.position import Position
from lamb_tpu.watch.clock import Clock


def test_starts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(Position(seconds=30.0, startup=8.0, starts=2), began=95.0)
    now[0] = 110.0
    clock.start()
    assert (clock.startup_of_this_start, clock.startup, clock.seconds) == (15.0, 23.0, 30.0)
    now[0] = 117.0
    assert clock.times() == {"seconds": 37.0, "seconds_with_startup": 60.0, "starts": 3}
    assert clock.since_began == 22.0
    # The next start continues from the times in the checkpoint.
    saved = Position(seconds=clock.seconds, startup=clock.startup, starts=clock.starts)
    again = Clock(saved, began=117.0)
    assert again.times() == {"seconds": 37.0, "seconds_with_startup": 60.0, "starts": 4}
