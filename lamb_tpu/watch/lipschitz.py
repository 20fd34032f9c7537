"""The local Lipschitz estimate of the LEGW paper during training: `config.log.lipschitz_rows`."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.run.build import Run
from lamb_tpu.run.preflight import train_check
from lamb_tpu.watch.observer import Observer, Record


class Lipschitz(Observer):
    """Adds the estimate `lipschitz` to every record, see `parallel.curvature.lipschitz`.

    The estimate always uses the examples on which the run trains first, so that runs with different
    batch sizes are compared on the same loss. The estimate does not change the training. Its time,
    spent in the context `paused(step, reason)`, does not count as time of updates.
    """

    def __init__(
        self, run: Run, paused: Callable[[int, str], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._run, self._paused = run, paused
        self._rows = run.spec.log.lipschitz_rows
        if not self._rows:
            return
        if self._rows > len(run.train_set):
            problem = "is more than the number of training examples"
            remedy = f"use at most {len(run.train_set)}"
            raise UserError("config.log.lipschitz_rows", self._rows, problem, remedy)
        shards = mesh_lib.num_batch_shards(run.mesh)
        mesh_lib.check_divides("config.log.lipschitz_rows", self._rows, shards, f"{shards} devices")

    @functools.cached_property
    def _batch(self) -> Any:
        mesh, seed = self._run.mesh, self._run.spec.seed
        local_rows = rows_lib.local_rows(self._rows, mesh)
        loader = data.TrainLoader(
            source=self._run.train_set,
            batch_size=self._rows,
            seed=seed,
            rows=local_rows,
            check=train_check(self._run),
        )
        return rows_lib.shard_batch(next(loader), self._rows, mesh)

    @functools.cached_property
    def _estimate(self) -> Any:
        return step_lib.make_lipschitz_step(self._run.plain_task, self._run.mesh)

    def recorded(self, record: Record) -> None:
        if self._rows:
            with self._paused(record.step, "estimate"):
                record.values["lipschitz"] = float(self._estimate(record.state, self._batch))
