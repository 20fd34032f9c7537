"""A run's session: lock of its folder, signals, watchdog, checkpoints and compiled programs."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lamb_tpu.cluster import distributed
from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.state import TrainState, resumed
from lamb_tpu.run.build import Run
from lamb_tpu.run.recipe import CurrentRecipe, Recipe
from lamb_tpu.run.together import Group
from lamb_tpu.store import programs
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.position import Position


class Session:
    """Lock, signal handlers, watchdog and checkpoints of a training run. Use as a context manager.

    A session keeps other runs out of the folder, handles SIGTERM and Ctrl-C, ends the process if it
    hangs, and saves and restores the state. All processes of a run must call the methods in the same
    order.

    Args:
      run: the run, with a folder.
      current: the run's recipe with the batch sizes decided so far.
      keeps: returns whether to keep an update's checkpoint after it is no longer one of the newest.
      warn: prints a line.
      group: the group to which this run belongs; None: the run is alone.

    Attributes:
      resumed: whether the state was restored from a checkpoint.
      saved_step: update of the newest checkpoint; at first the update from which the run resumes.
    """

    def __init__(
        self,
        run: Run,
        current: CurrentRecipe,
        keeps: Callable[[int], bool],
        warn: Callable[[str], None],
        group: Group | None = None,
    ) -> None:
        assert run.folder is not None  # a run that is only planned has no session
        self._run, self._current, self._folder = run, current, run.folder
        self._keeps, self._warn, self._group = keeps, warn, group
        self._is_first = jax.process_index() == 0
        self._stack = contextlib.ExitStack()
        self._records: MetricsWriter | None = None
        self.resumed = False
        self.saved_step = 0

    @property
    def _recipe(self) -> Recipe:
        return self._current.value

    def __enter__(self) -> "Session":
        run = self._run
        # If entering one context fails, this stack exits the previous contexts. Once all are
        # entered, `pop_all` prevents that.
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            # Take the lock first: nothing may be written into a folder that another run holds. The
            # thread that renews the lock calls `fail` only later.
            enter(self._folder.hold(self._is_first, self.fail))
            enter(programs.kept_in(self._folder.path))
            # The runs of a group share one signal handler.
            self._preemption = (
                enter(Preemption(begins=False)) if self._group is None else self._group.preemption
            )
            self._watchdog = enter(distributed.Watchdog(run.spec.guards.hang_seconds))
            # Entered last, so exited first: signals, watchdog and lock stay active while the exit
            # waits for a save.
            self._checkpoints = enter(
                Checkpoints(
                    self._folder.checkpoints,
                    run.spec.checkpoint.keep,
                    self._warn,
                    keep_besides=lambda step: (
                        self._keeps(step) or self._recipe.is_due(self._recipe.keep_every, step)
                    ),
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self._stack.__exit__(*exception)

    def restore(self) -> tuple[TrainState, Position]:
        """Returns the newest readable checkpoint, or the initial state if there is none."""
        restored = self._checkpoints.restore_latest(self._run.saved_state)
        if restored is None:
            return self._run.first_state(), Position()
        state, saved = restored
        self.resumed, self.saved_step = True, int(state.step)
        for part in self._run.parts:
            if self._is_first and (message := part.moved(state.parts[part.name])):
                self._warn(message)
        return resumed(state, self._run.parts), Position.from_json(saved)

    def open_records(
        self, step: int, position: Position, is_over: bool
    ) -> tuple[MetricsWriter, bool]:
        """Opens metrics.jsonl after update `step`, and saves the config and library versions.

        Also returns whether update `step` must be evaluated, because the evaluation is still due or
        the record of the evaluation was lost, for example in a power failure.
        """
        run, spec = self._run, self._run.spec
        with distributed.together():
            # A complete run that is started again trains nothing, so it writes nothing.
            if self._is_first and not is_over:
                # After its first checkpoint, the run no longer needs its initial weights.
                if not self.resumed and run.start is not None:
                    self._folder.write_init(run.start.record)
                metadata = {
                    "mesh": dict(run.mesh.shape),
                    "batch_norm": run.batch_norm,
                    "from_step": step,
                    **({} if self._group is None else {"together": self._group.runs}),
                }
                self._folder.write_receipt(spec, run.leaves.table(), metadata, run.train_set)
            self._records = MetricsWriter(
                workdir=self._folder.path,
                start_step=step,
                tensorboard=spec.log.tensorboard,
                enabled=self._is_first,
                evaluated=not position.eval_due,
                failed=self.fail,
                expected=position.records,
            )
        missing = dict(self._records.missing)
        is_lost = bool(
            missing.get("eval")
            and step not in self._records.steps
            and self._recipe.is_due(self._recipe.eval_every, step)
            and not position.eval_due
        )
        if is_lost:
            self._warn(
                f"{self._records.path} has lost the evaluation of update {step}, which is repeated"
            )
            missing["eval"] -= 1
        if sum(missing.values()):
            listed = ", ".join(f"{count} {kind!r}" for kind, count in missing.items() if count)
            self._warn(
                f"{self._records.path} has lost records up to update {step}: {listed}; restore it "
                "from a copy if you have one"
            )
        # Only the first process reads the file, but all processes evaluate.
        is_lost = bool(multihost_utils.broadcast_one_to_all(np.bool_(is_lost)))
        return self._records, position.eval_due or is_lost

    def begin(self) -> None:
        """Makes the run save on SIGTERM and Ctrl-C; until this call, these signals end it at once."""
        self._preemption.begin()

    def poll(self, completed: str) -> None:
        """Reports progress to the watchdog; raises `Preempted`, or an error passed to `fail`."""
        self._watchdog.progress(completed)
        # Saves run in a thread, which cannot raise here.
        if (failure := self._checkpoints.failure()) is not None:
            self.fail(failure)
        self._preemption.poll()

    def poll_evaluation(self) -> None:
        """Polls between two batches of an evaluation."""
        self.poll("a batch of the evaluation")

    def fail(self, error: UserError) -> None:
        """Makes the next `poll` raise an error of this process in every process."""
        self._preemption.fail(error)

    def keep_file(self, name: str, text: str) -> None:
        """Writes a file into the run's folder."""
        try:
            self._folder.write_file(name, text)
        except UserError as error:
            # If only this process raised, the others would wait for it in the evaluation.
            self.fail(error)

    def save(self, step: int, state: TrainState, position: Position) -> None:
        """Starts to save a checkpoint of update `step`; raises if an earlier write has failed."""
        # Records first: a run must not resume from a state whose records are missing.
        if self._records is not None:
            self._records.flush()
            position = dataclasses.replace(position, records=dict(self._records.counts))
        self._preemption.settle()
        position = dataclasses.replace(position, total_steps=self._recipe.total_steps)
        self._checkpoints.save(step, state, position.to_json())
        self.saved_step = step

    def last_checkpoint(self) -> str:
        """Waits for a save in progress; returns the path of the newest checkpoint, for messages."""
        self._checkpoints.wait()
        saved = self._checkpoints.steps()
        return str(self._checkpoints.directory / str(saved[-1])) if saved else "not yet written"

    def finish(self) -> None:
        """Waits for a save in progress; raises an error passed to `fail` since the last poll."""
        self._checkpoints.wait()
        self._preemption.settle()
