"""Metrics of updates, fetched from the devices for a record."""

import collections
from collections.abc import Iterable
from typing import Any

import jax

from lamb_tpu import tasks
from lamb_tpu.store.metrics import mean_metrics
from lamb_tpu.watch.observer import Sums

# The number of updates that the host may run ahead of the devices: enough to hide the host's work,
# few enough that batches do not pile up in device memory.
_IN_FLIGHT = 2


class Updates:
    """Metrics of the updates since the last record.

    Args:
      unlogged: metrics of updates that a preempted start had not recorded.
    """

    def __init__(self, unlogged: Iterable[Sums] = ()) -> None:
        self._in_flight: collections.deque[Any] = collections.deque()
        self._on_device: list[tuple[int, tasks.Sums]] = []
        self.unlogged: list[Any] = list(unlogged)

    def add(self, step: int, metrics: tasks.Sums) -> None:
        """Adds the metrics of update `step`, and waits for an earlier update."""
        self._on_device.append((step, metrics))
        # An update is complete when its metrics are.
        self._in_flight.append(metrics)
        if len(self._in_flight) > _IN_FLIGHT:
            jax.block_until_ready(self._in_flight.popleft())

    def wait(self) -> None:
        """Waits for every update."""
        jax.block_until_ready(list(self._in_flight))

    def fetch(self) -> list[tuple[int, Sums]]:
        """Fetches the metrics to the host; returns the new ones, as pairs (update, metrics)."""
        fetched = jax.device_get(self._on_device)
        self._on_device.clear()
        # As plain numbers, because a checkpoint holds them as JSON.
        self.unlogged.extend(jax.tree.map(float, sums) for _, sums in fetched)
        return fetched

    def take(self) -> tuple[int, dict[str, float]]:
        """Returns the number of updates and the means over them, and starts anew."""
        count, means = len(self.unlogged), mean_metrics(self.unlogged)
        self.unlogged = []
        return count, means
