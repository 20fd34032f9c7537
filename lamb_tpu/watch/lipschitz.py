"""The local Lipschitz estimate of the LEGW paper along training: `config.log.lipschitz_rows`."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.run.build import Run
from lamb_tpu.run.preflight import train_check
from lamb_tpu.watch.observer import Observer, Record


class Lipschitz(Observer):
    """Adds the estimate `lipschitz` to every record, see `parallel.curvature.lipschitz`.

    It is always taken over the same rows, the first of the run's order, so that runs of different
    batches are compared at the same loss. It reads the state and changes nothing.

    Args:
      run: the run; nothing is estimated unless its `config.log.lipschitz_rows` is above 0.
      paused: `(step, reason)` -> a context in which time does not count as the updates'.

    Raises:
      UserError: there are fewer examples than rows, or they do not divide over the devices.
    """

    def __init__(
        self, run: Run, paused: Callable[[int, str], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._run, self._paused = run, paused
        self._rows = run.config.log.lipschitz_rows
        if not self._rows:
            return
        if self._rows > len(run.train_set):
            raise UserError(
                f"config.log.lipschitz_rows is {self._rows}; it must be at most the "
                f"{len(run.train_set)} examples of the training set"
            )
        shards = mesh_lib.num_batch_shards(run.mesh)
        mesh_lib.check_divides("config.log.lipschitz_rows", self._rows, shards, f"{shards} devices")

    @functools.cached_property
    def _batch(self) -> Any:
        mesh, config = self._run.mesh, self._run.config
        own = mesh_lib.local_rows(self._rows, mesh)
        loader = data.TrainLoader(
            self._run.train_set, self._rows, config.seed, own, train_check(self._run)
        )
        return mesh_lib.shard_batch(next(loader), self._rows, mesh)

    @functools.cached_property
    def _estimate(self) -> Any:
        return step_lib.make_lipschitz_step(self._run.plain_task, self._run.mesh)

    def recorded(self, record: Record) -> None:
        if self._rows:
            with self._paused(record.step, "estimate"):
                record.values["lipschitz"] = float(self._estimate(record.state, self._batch))
