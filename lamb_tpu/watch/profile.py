"""A JAX profile of some updates, for XProf and Perfetto: `train --profile=N`."""

import contextlib
import pathlib
from collections.abc import Callable

import jax

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from lamb_tpu.watch.observer import Observer, Start


class Profile(Observer):
    """Profiles `updates` updates after the first in this process, which also loads the compiled step.

    Process 0 profiles its devices and its host, and writes WORKDIR/profile/plugins/profile/TIME. The
    profile includes evaluations and saves between the profiled updates. It is started and written in
    the context `paused(step, reason)`, so that this time does not count as time of updates.
    """

    def __init__(
        self,
        updates: int,
        run: Run,
        report: Callable[[str], None],
        paused: Callable[[int, str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._updates, self._report, self._paused = updates, report, paused
        self._total = run.recipe.total_steps
        self._first, self._begin, self._is_running = 0, 0, False
        self._update = contextlib.ExitStack()
        self._check(self._total, "the run has")
        assert run.folder is not None
        if buckets.is_remote(str(run.folder.path)):
            problem = f"is in a bucket, and --profile={updates} needs a local folder"
            raise UserError("--workdir", run.folder.path, problem, "profile a short local run")
        self._folder = pathlib.Path(str(run.folder.path)) / "profile"

    def started(self, start: Start) -> None:
        if start.is_over:
            self._report("--profile profiles nothing, because the run is already complete")
            return
        self._check(self._total - start.step, f"after update {start.step} the run has")
        self._begin = start.step + 1
        if not jax.process_index():
            self._first = self._begin

    def ends_call(self, step: int) -> bool:
        # Calls must end at the same updates in every process.
        return step in (self._begin, self._begin + self._updates)

    def updating(self, step: int) -> None:
        if self._is_running:  # XProf splits its time line by these annotations
            self._update.enter_context(
                jax.profiler.StepTraceAnnotation("update", step_num=step + 1)
            )

    def updated(self, step: int, state: TrainState) -> None:
        if not self._first:
            return
        self._update.close()
        if step == self._first:
            with self._paused(step, "profile"):
                jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._is_running = True
        elif step == self._first + self._updates:
            jax.block_until_ready(state)
            self._write(step)

    def ended(self) -> None:
        # A signal, a target or a failure ended the start before the last update to profile.
        if self._is_running:
            self._write(None)

    def _write(self, step: int | None) -> None:
        self._is_running = False
        with self._paused(step or 0, "profile"):
            jax.profiler.stop_trace()
        (newest,) = sorted(self._folder.rglob("perfetto_trace.json.gz"))[-1:]
        what = f"updates {self._first + 1} to {step}" if step else "the updates up to here"
        self._report(
            f"profile of {what}: open {newest} at https://ui.perfetto.dev, or run `xprof "
            f"--logdir={self._folder}` (pip install xprof)"
        )

    def _check(self, available: int, who: str) -> None:
        # The first update of a start is not profiled.
        if self._updates >= available:
            problem = f"is too many: {who} {available} update(s), and the first is not profiled"
            remedy = f"use at most {available - 1}" if available > 1 else "leave out the flag"
            raise UserError("--profile", self._updates, problem, remedy)
