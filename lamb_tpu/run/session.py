"""A run's hold on its folder and its process: lock, signals, watchdog, checkpoints."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from lamb_tpu.cluster import distributed
from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.position import Position


class Session:
    """What a start of a run holds while it trains. Use as a context manager.

    It keeps other runs out of the folder, answers SIGTERM and Ctrl-C, ends the process when it
    hangs, and saves and restores. In a run of several processes, all must call its methods at the
    same places.

    Args:
      run: the run, with a folder.
      keeps: tells whether the checkpoint of an update is to be kept besides the newest ones.
      warn: shows a line.

    Attributes:
      resumed: the state was restored from a checkpoint.
      saved_step: the update of the newest checkpoint; at first that where the start goes on.
    """

    def __init__(
        self, run: Run, keeps: Callable[[int], bool], warn: Callable[[str], None]
    ) -> None:
        assert run.folder is not None  # a run that is only planned is not held
        self._run, self._folder = run, run.folder
        self._keeps, self._warn = keeps, warn
        self._is_first = jax.process_index() == 0
        self._stack = contextlib.ExitStack()
        self.resumed = False
        self.saved_step = 0

    def __enter__(self) -> "Session":
        run, recipe = self._run, self._run.recipe
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(self._folder.hold(self._is_first))
            self._preemption = enter(Preemption())
            self._watchdog = enter(distributed.Watchdog(run.config.guards.hang_seconds))
            self._checkpoints = enter(Checkpoints(
                self._folder.checkpoints,
                run.config.checkpoint.keep,
                self._warn,
                keep_besides=lambda step: self._keeps(step) or recipe.is_due(
                    recipe.keep_every, step
                ),
            ))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self._stack.__exit__(*exception)

    def restore(self) -> tuple[TrainState, Position]:
        """Returns the newest checkpoint that can be read; without one, the first state.

        Raises:
          UserError: there are checkpoints, and none can be read.
        """
        restored = self._checkpoints.restore_latest(self._run.abstract_state)
        if restored is None:
            return self._run.first_state(), Position()
        state, saved = restored
        self.resumed, self.saved_step = True, int(state.step)
        return state, Position.from_json(saved)

    def open_records(self, step: int, position: Position, is_over: bool) -> MetricsWriter:
        """Writes what this start runs on, and opens metrics.jsonl behind update `step`.

        Raises:
          UserError: a file cannot be written; in every process.
        """
        run, config = self._run, self._run.config
        with distributed.together():
            if self._is_first and not is_over:
                if not self.resumed and run.start is not None:
                    self._folder.write_init(run.start.record)
                facts = {
                    "mesh": dict(run.mesh.shape), "batch_norm": run.batch_norm, "from_step": step,
                }
                self._folder.write_receipt(config, run.table, facts, run.train_set)
            return MetricsWriter(
                self._folder.path, step, config.log.tensorboard, self._is_first,
                not position.eval_due, self.fail,
            )

    def poll(self, completed: str) -> None:
        """Notes what was completed, and ends the start where it was asked to end or cannot go on.

        Raises:
          Preempted: SIGTERM or Ctrl-C has come.
          UserError: a save or the writing of a file has failed.
        """
        self._watchdog.progress(completed)
        if (failure := self._checkpoints.failure()) is not None:
            self.fail(failure)
        self._preemption.poll()

    def poll_evaluation(self) -> None:
        """Does the same between two batches of an evaluation."""
        self.poll("a batch of the evaluation")

    def fail(self, error: UserError) -> None:
        """Ends the start at the next `poll`, in every process, with an error of this one."""
        self._preemption.fail(error)

    def keep_file(self, name: str, text: str) -> None:
        """Writes a file into the run's folder."""
        try:
            self._folder.write_file(name, text)
        except UserError as error:
            self.fail(error)

    def save(self, step: int, state: TrainState, position: Position) -> None:
        """Starts to save a checkpoint of update `step`.

        Raises:
          UserError: it, the save before it, or a record of an update before it cannot be written.
        """
        self._preemption.settle()  # a state whose records are missing must not be resumed from
        self._checkpoints.save(step, state, position.to_json())
        self.saved_step = step

    def last_checkpoint(self) -> str:
        """Waits for a save under way; returns the path of the newest checkpoint, for messages."""
        self._checkpoints.wait()
        saved = self._checkpoints.steps()
        return str(self._checkpoints.directory / str(saved[-1])) if saved else "not yet written"

    def finish(self) -> None:
        """Waits for a save under way, and raises what `fail` was told of since the last poll.

        Raises:
          UserError: something could not be written.
        """
        self._checkpoints.wait()
        self._preemption.settle()
