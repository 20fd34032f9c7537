"""Checkpoints of a run: the train state and the data position, saved and restored together."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lamb_tpu import checksums
from lamb_tpu.errors import UserError

_SAVE = ocp.training.save_decision_policies
_KEEP = ocp.training.preservation_policies


class Checkpoints:
    """The checkpoints of one workdir, named by completed updates.

    Saves are asynchronous: the state is copied off the devices, then written by threads while
    training goes on. A checkpoint appears under its name only when it is complete, with the
    checksums of its files. Use as a context manager, or call `close`: both wait for a save under
    way.

    Args:
      directory: where they lie; made when missing.
      keep: how many of the newest to keep.
      report: called with a sentence when a damaged checkpoint is passed over.
      writing: False for a mere reader, which must not clear away what a run beside it is saving.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        keep: int,
        report: Callable[[str], None] = print,
        writing: bool = True,
    ) -> None:
        self.directory = directory.resolve()
        self._report = report
        self._saving: int | None = None
        context = ocp.Context()
        # A function and not a method, which Orbax would copy together with this object.
        context.asynchronous.post_finalization_callback = lambda: self._seal()
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,
            # The trainer decides when to save; Orbax' default would save continuously.
            save_decision_policy=_SAVE.FixedIntervalPolicy(1),
            preservation_policy=_KEEP.LatestN(keep),
            cleanup_tmp_directories=writing,
            context=context,
        )

    def steps(self) -> list[int]:
        """Completed updates of the checkpoints on disk, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts saving `state` (a pytree of arrays) and `position` (JSON-able) as update `step`.

        Checkpoints of this and of later updates, which can only be damaged ones that a resumed run
        has passed over, are removed first: they would count among those to keep.
        """
        for damaged in [there for there in self.steps() if there >= step]:
            self._checkpointer.delete(damaged)
        self._checkpointer.wait()  # for the save before, whose checksums go by `_saving`
        self._saving = step
        self._checkpointer.save_checkpointables_async(
            step, {"state": state, "position": position}
        )

    def _seal(self) -> None:
        """Adds the checksums, in Orbax' thread, when all is written but the name not yet given."""
        if jax.process_index() == 0:
            for folder in self.directory.glob(f"{self._saving}.*"):
                checksums.write(folder)

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """State and data position of update `step`, placed as `abstract_state` says.

        Args:
          step: one of `steps()`.
          abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          UserError: there is no such checkpoint, and the message lists those there are; or it is
            damaged.
        """
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.directory} has no checkpoint of update {step}; it has: {there}")
        try:
            damage = checksums.find_damage(self.directory / str(step))
            if damage is None:
                loaded = self._checkpointer.load_checkpointables(
                    step, {"state": abstract_state, "position": None}
                )
                return jax.block_until_ready(loaded["state"]), loaded["position"]
        except Exception as error:  # Orbax and TensorStore raise many types
            damage = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"the checkpoint of update {step} in {self.directory} cannot be read ({damage})"
        )

    def restore_latest(self, abstract_state: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest checkpoint that can be read, or None when there is none at all.

        One that cannot be read is reported and the one before it tried.

        Raises:
          UserError: there are checkpoints but none can be read.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.restore(step, abstract_state)
            except UserError as error:
                self._report(f"{error}; trying the one before it")
        if steps:
            raise UserError(
                f"none of the checkpoints {steps} in {self.directory} can be read; move the folder "
                "away to start again, or give another --workdir"
            )
        return None

    def close(self) -> None:
        """Waits for a save under way."""
        self._checkpointer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
