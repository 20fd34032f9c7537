"""A run's hold on its folder and its process: lock, signals, watchdog, checkpoints, programs."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from lamb_tpu.cluster import distributed
from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.state import TrainState, resumed
from lamb_tpu.run.build import Run
from lamb_tpu.store import programs
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.position import Position


class Session:
    """Lock, signal handlers, watchdog and checkpoints of a training run. Use as a context manager.

    It keeps other runs out of the folder, handles SIGTERM and Ctrl-C, ends the process when it
    hangs, and saves and restores. In a run of several processes, all must call its methods in the
    same order.

    Args:
      run: the run, with a folder.
      keeps: returns whether to keep the checkpoint of an update that is not one of the newest.
      warn: prints a line.

    Attributes:
      resumed: whether the state was restored from a checkpoint.
      saved_step: update of the newest checkpoint; at first the update from which the run resumes.
    """

    def __init__(self, run: Run, keeps: Callable[[int], bool], warn: Callable[[str], None]) -> None:
        assert run.folder is not None  # a run that is only planned is not held
        self._run, self._folder = run, run.folder
        self._keeps, self._warn = keeps, warn
        self._is_first = jax.process_index() == 0
        self._stack = contextlib.ExitStack()
        self._records: MetricsWriter | None = None
        self.resumed = False
        self.saved_step = 0

    def __enter__(self) -> "Session":
        run, recipe = self._run, self._run.recipe
        # If a part cannot be entered, those before it are left again; `pop_all` prevents that at
        # the end.
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            # First the lock: nothing may be written into a folder that another run holds.
            # It is renewed now and then, so that `fail` is called later if at all.
            enter(self._folder.hold(self._is_first, self.fail))
            enter(programs.kept_in(self._folder.path))
            self._preemption = enter(Preemption())
            self._watchdog = enter(distributed.Watchdog(run.config.guards.hang_seconds))
            # Last in and first out: while a save is waited for, signals are still noticed, the
            # watchdog still watches and the folder is still locked.
            self._checkpoints = enter(
                Checkpoints(
                    self._folder.checkpoints,
                    run.config.checkpoint.keep,
                    self._warn,
                    keep_besides=lambda step: (
                        self._keeps(step) or recipe.is_due(recipe.keep_every, step)
                    ),
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self._stack.__exit__(*exception)

    def restore(self) -> tuple[TrainState, Position]:
        """Returns the newest readable checkpoint; without checkpoints, the initial state.

        Raises:
          UserError: there are checkpoints, but none can be read.
        """
        restored = self._checkpoints.restore_latest(self._run.saved_state)
        if restored is None:
            return self._run.first_state(), Position()
        state, saved = restored
        self.resumed, self.saved_step = True, int(state.step)
        for part in self._run.parts:
            if self._is_first and (told := part.moved(state.parts[part.name])):
                self._warn(told)
        return resumed(state, self._run.parts), Position.from_json(saved)

    def open_records(self, step: int, position: Position, is_over: bool) -> MetricsWriter:
        """Records versions and hardware of this start; opens metrics.jsonl after update `step`.

        Raises:
          UserError: a file cannot be written; it is raised in every process.
        """
        run, config = self._run, self._run.config
        with distributed.together():
            # A complete run that is started again trains nothing, so it leaves no receipt.
            if self._is_first and not is_over:
                # From its first checkpoint on, the run does without the folder of its initial
                # weights.
                if not self.resumed and run.start is not None:
                    self._folder.write_init(run.start.record)
                facts = {
                    "mesh": dict(run.mesh.shape),
                    "batch_norm": run.batch_norm,
                    "from_step": step,
                }
                self._folder.write_receipt(config, run.leaves.table(), facts, run.train_set)
            self._records = MetricsWriter(
                self._folder.path,
                step,
                config.log.tensorboard,
                self._is_first,
                not position.eval_due,
                self.fail,
            )
            return self._records

    def poll(self, completed: str) -> None:
        """Tells the watchdog what was completed, and raises if the run must end.

        Raises:
          Preempted: SIGTERM or Ctrl-C arrived.
          UserError: a save or the writing of a file failed.
        """
        self._watchdog.progress(completed)
        # Saves fail in a thread, which cannot raise here.
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
            # Raised here, in one process, it would leave the others waiting in the evaluation.
            self.fail(error)

    def save(self, step: int, state: TrainState, position: Position) -> None:
        """Starts to save a checkpoint of update `step`.

        Raises:
          UserError: this save, the previous save, or a record of an earlier update failed.
        """
        # A state whose records are missing must not be resumed from.
        if self._records is not None:
            self._records.flush()
        self._preemption.settle()
        position = dataclasses.replace(position, total_steps=self._run.recipe.total_steps)
        self._checkpoints.save(step, state, position.to_json())
        self.saved_step = step

    def last_checkpoint(self) -> str:
        """Waits for a save in progress; returns the path of the newest checkpoint, for messages."""
        self._checkpoints.wait()
        saved = self._checkpoints.steps()
        return str(self._checkpoints.directory / str(saved[-1])) if saved else "not yet written"

    def finish(self) -> None:
        """Waits for a save in progress, and raises an error passed to `fail` since the last poll.

        Raises:
          UserError: something could not be written.
        """
        self._checkpoints.wait()
        self._preemption.settle()
