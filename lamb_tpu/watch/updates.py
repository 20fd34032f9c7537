"""Fetches the metrics of updates from the devices for a record."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from lamb_tpu import tasks
from lamb_tpu.store.metrics import mean_metrics
from lamb_tpu.watch.observer import Sums

# Calls of the compiled step by which the host may run ahead of the devices: enough to hide the
# host's work, few enough that batches do not pile up in device memory.
_IN_FLIGHT = 2


class Updates:
    """Collects the metrics of updates; `unlogged` has the fetched metrics that no record contains yet."""

    def __init__(self, unlogged: Iterable[Sums] = ()) -> None:
        self._in_flight: collections.deque[Any] = collections.deque()
        self._on_device: list[tuple[int, int, tasks.Sums]] = []
        self.unlogged: list[Any] = list(unlogged)

    def add(self, step: int, metrics: tasks.Sums, count: int = 1) -> None:
        """Adds the metrics of one call of the compiled step, and waits for an earlier call.

        `step` is the first update of the call, counted from 1. If the call made several updates, its
        metrics have a leading axis (count,).
        """
        self._on_device.append((step, count, metrics))
        # A call is complete when its metrics are available.
        self._in_flight.append(metrics)
        if len(self._in_flight) > _IN_FLIGHT:
            jax.block_until_ready(self._in_flight.popleft())

    def wait(self) -> None:
        """Waits until the devices have completed all added updates."""
        jax.block_until_ready(list(self._in_flight))

    def fetch(self) -> list[tuple[int, Sums]]:
        """Fetches new metrics to the host; returns them as pairs (update, metrics)."""
        fetched: list[tuple[int, Sums]] = []
        on_host = jax.device_get([sums for *_, sums in self._on_device])
        for (step, count, _), sums in zip(self._on_device, on_host, strict=True):
            # Lists, because indexing an array is slow.
            lists = jax.tree.map(lambda values: np.reshape(values, -1).tolist(), sums)
            for index in range(count):
                each = {
                    name: (total[index], weight[index]) for name, (total, weight) in lists.items()
                }
                fetched.append((step + index, each))
        self._on_device.clear()
        # Convert to floats, because a checkpoint stores them as JSON.
        self.unlogged.extend(jax.tree.map(float, sums) for _, sums in fetched)
        return fetched

    def take(self) -> tuple[int, dict[str, float]]:
        """Returns the number of unlogged updates and their mean metrics; then clears `unlogged`."""
        count, means = len(self.unlogged), mean_metrics(self.unlogged)
        self.unlogged = []
        return count, means
