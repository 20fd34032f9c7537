"""Checkpoints of a run: the train state and the data position, saved and restored together."""

import contextlib
import copy
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading, writing
from lamb_tpu.store import checksums
from lamb_tpu.store.saving import Background

T = TypeVar("T")
_REMOVALS = 20  # attempts
_SAVE = ocp.training.save_decision_policies
_KEEP = ocp.training.preservation_policies


class Checkpoints:
    """The checkpoints of one workdir, named by completed updates.

    Saves are asynchronous: the state is copied off the devices, then written by threads while
    training continues. A checkpoint gets its name only when it is complete, with the checksums of
    its files. `wait` waits for that; `failure` returns the error of a failed save. Use as a context
    manager, or call `close`: both wait for a save in progress.

    Args:
      directory: folder of the checkpoints; created if it is missing.
      keep: number of newest checkpoints to keep.
      report: called with a sentence when a damaged checkpoint is skipped.
      writes: False for a reader, which must not remove what a run is saving at the same time.
      keep_besides: returns whether to keep the checkpoint of an update that is no longer one of the
        newest; called at each save.

    Raises:
      UserError: `directory` must be written but cannot be; it is raised in every process.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        keep: int,
        report: Callable[[str], None] = print,
        writes: bool = True,
        keep_besides: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._in_bucket = buckets.is_remote(directory)
        self.directory = directory if self._in_bucket else directory.resolve()
        self._report = report
        self._saving: int | None = None
        self._is_told = False  # whether the caller has the error of the failed save
        self._background = Background()
        self._resources = contextlib.ExitStack()
        if writes:
            if not self._in_bucket:
                with distributed.together(), writing.checked(self.directory):
                    self.directory.mkdir(parents=True, exist_ok=True)
            self.try_out()
            if jax.process_index() == 0:
                self._remove_unfinished()  # Orbax would, in a thread that may outlive the run
        self._path = self._plain_path()
        context = ocp.Context()
        # When Orbax creates directories in a thread, it reports a failure only after 300 s. Several
        # processes need it all the same: none may raise while the others wait at Orbax' barriers.
        context.asynchronous.create_directories_asynchronously = jax.process_count() > 1
        # A function and not a method, which Orbax would copy together with this object.
        context.asynchronous.post_finalization_callback = lambda: self._seal()
        # JSON is written as one file; by default Orbax would write every number as an array.
        context.checkpointables.registry = ocp.handlers.local_registry()
        context.checkpointables.registry.add(
            ocp.handlers.JsonHandler, checkpointable_name="position"
        )
        self._checkpointer = ocp.training.Checkpointer(
            self._path,
            # The trainer decides when to save; Orbax' default would save continuously.
            save_decision_policy=_SAVE.FixedIntervalPolicy(1),
            preservation_policy=_KEEP.AnyPreservationPolicy(
                [_KEEP.LatestN(keep), _Chosen(keep_besides)]
            ),
            context=context,
        )
        # Orbax also polls JAX for a preemption, with the update as the number of the poll. That
        # would disturb the numbers by which `Preemption` stops all processes at the same poll.
        self._checkpointer._manager.reached_preemption = lambda step: False

    def _plain_path(self) -> pathlib.Path:
        """Returns a path of the directory without [ ] * and ?, which Orbax takes for a pattern."""
        if not reading.has_pattern(self.directory):
            return self.directory
        link = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="lamb_tpu-"))
        path = pathlib.Path(link) / "checkpoints"
        path.symlink_to(self.directory)
        return path

    def steps(self) -> list[int]:
        """Completed updates of the checkpoints on disk, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def _remove_unfinished(self) -> None:
        if self._in_bucket:
            with writing.checked(self.directory), buckets.plain_errors():
                for folder in buckets.children(self.directory):
                    if not checksums.is_committed(folder):
                        buckets.remove(folder)
            return
        # Threads of the save that failed may still be writing there.
        for _ in range(_REMOVALS):
            folders = list(self.directory.glob("*.orbax-checkpoint-tmp*"))
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            if not folders:
                break
            time.sleep(0.1)

    def try_out(self) -> None:
        """Writes a small file where checkpoints go, to find a bad disk before work is lost.

        All processes must call it.

        Raises:
          UserError: the file cannot be written; it is raised in every process.
        """
        with distributed.together():
            try:
                writing.try_out(self.directory)
            except OSError as error:
                raise self._gone() or UserError(
                    f"no checkpoint can be saved in {self.directory} ({writing.reason(error)}); "
                    f"{self._what_is_safe()}"
                ) from None

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts saving `state` (a pytree of arrays) and `position` (JSON values) as update `step`.

        Both may be changed, or donated, as soon as the call returns.

        Checkpoints of this and of later updates are removed first. They can only be damaged ones
        that a resumed run has skipped, and would count among those to keep.

        Raises:
          UserError: this save or the one before failed; the message names the safe checkpoint.
        """
        # One save at a time. An error of the last one must be raised before another begins.
        self.wait()
        self.try_out()
        # A list of its own, because deleting changes the steps.
        for damaged in [there for there in self.steps() if there >= step]:
            self._checkpointer.delete(damaged)
        self._saving = step
        try:
            self._background.begin()
            response = self._checkpointer.save_checkpointables_async(
                # Orbax copies the arrays now, but reads JSON values later, in its thread.
                step,
                {"state": state, "position": copy.deepcopy(position)},
            )
            self._background.started(response)
        except Exception as error:  # Orbax and TensorStore raise many types
            self._background.fail(error)
            raise self._failed(error) from None

    def failure(self) -> UserError | None:
        """Returns the error of a failed save as soon as it is known, without waiting."""
        error = self._background.error
        return None if error is None else self._failed(error)

    def wait(self) -> None:
        """Waits for a save in progress, and checks that its checkpoint is complete.

        All processes must call it.

        Raises:
          UserError: the save failed; the message names the safe checkpoint. It is raised in every
            process.
        """
        if self._saving is not None:
            with distributed.together():
                self._finish()
            self._saving = None

    def _finish(self) -> None:
        try:
            self._background.wait()
            if jax.process_index() == 0:
                folder = self.directory / str(self._saving)
                # Names only: the files have just been read for their checksums.
                if (damage := checksums.find_damage(folder, contents=False)) is not None:
                    raise ValueError(damage)
        except Exception as error:
            self._background.fail(error)
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> UserError:
        self._is_told = True
        # A missing folder explains any error, and needs other advice.
        return self._gone() or UserError(
            f"the checkpoint of update {self._saving} cannot be saved in {self.directory} "
            f"({writing.reason(error)}); {self._what_is_safe()}"
        )

    def _gone(self) -> UserError | None:
        return (
            None
            if self._in_bucket or self.directory.is_dir()
            else UserError(
                f"the folder of the checkpoints, {self.directory}, is no longer there; put it back and "
                "start the same command again, or start it with another --workdir"
            )
        )

    def _what_is_safe(self) -> str:
        repair = writing.repair(self.directory)
        # The disk may be the one that has just failed.
        with contextlib.suppress(OSError):
            if steps := [int(path.name) for path in self._complete()]:
                return (
                    f"that of update {max(steps)} is safe: {repair}, then start the same command "
                    "again to go on from there"
                )
        return f"none is there yet: {repair}, then start the same command again"

    def _complete(self) -> list[pathlib.Path]:
        if self._in_bucket:
            with buckets.plain_errors():
                return list(filter(checksums.is_committed, buckets.children(self.directory)))
        return [
            path
            for path in self.directory.iterdir()
            if path.name.isdecimal() and (path / checksums.NAME).is_file()
        ]

    def _seal(self) -> None:
        """Adds the checksums after all files are written and before the checkpoint gets its name.

        Orbax calls this in its thread on process 0, after a barrier behind every process' last
        write.
        """
        if jax.process_index() == 0:
            if self._in_bucket:  # which cannot rename; there a last file makes it complete
                folder = self.directory / str(self._saving)
            else:
                # Orbax' temporary name of the checkpoint, such as 7.orbax-checkpoint-tmp.
                (folder,) = self.directory.glob(f"{self._saving}.*")
            checksums.write(folder)

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Returns state and position of update `step`, placed as `abstract_state` says.

        Args:
          step: one of `steps()`.
          abstract_state: pytree of `jax.ShapeDtypeStruct`s with shardings; or a function that
            returns it from the checkpoint's `shapes`.

        Raises:
          UserError: there is no such checkpoint (the message lists the existing ones), or it is
            damaged.
        """

        def load() -> tuple[Any, dict[str, Any]]:
            state = abstract_state
            if callable(state):
                state = state(self._shapes(step))
            loaded = self._checkpointer.load_checkpointables(
                step, {"state": state, "position": None}
            )
            return jax.block_until_ready(loaded["state"]), loaded["position"]

        return self._read(step, load)

    def shapes(self, step: int) -> dict[str, Any]:
        """Returns shapes and dtypes of the state of update `step`, without reading its arrays.

        Returns:
          The state's fields as dicts and lists of `jax.ShapeDtypeStruct`s, without random keys.

        Raises:
          UserError: see `restore`.
        """

        return self._read(step, lambda: self._shapes(step))

    def position(self, step: int) -> dict[str, Any]:
        """Returns the position of update `step`, for which `shapes` has succeeded."""
        return self._checkpointer.load_checkpointables(step, {"position": None})["position"]

    def _shapes(self, step: int) -> dict[str, Any]:
        state = self._checkpointer.metadata(step).metadata
        return {
            name: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
            for name, tree in state.items()
            if name != "key"
        }

    def restore_part(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Reads some of the arrays of update `step`, placed as `abstract` says.

        Args:
          step: one of `steps()` for which `shapes` has succeeded.
          abstract: fields of the state, or some of the keys of the dicts in them, as
            `jax.ShapeDtypeStruct`s with shardings.
        """
        context = ocp.Context()
        # Otherwise Orbax wants the whole structure of the state.
        context.pytree.loading.partial_load = True
        with context:
            found = ocp.load(self._path / str(step), abstract, checkpointable_name="state")
        return jax.block_until_ready(found)

    def _read(self, step: int, load: Callable[[], T]) -> T:
        """Calls `load` after comparing the files of update `step` with their checksums."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.directory} has no checkpoint of update {step}; it has: {there}")
        try:
            damage = self._find_damage(step)
            if damage is None:
                return load()
        except Exception as error:  # Orbax and TensorStore raise many types
            damage = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"the checkpoint of update {step} in {self.directory} cannot be read ({damage})"
        )

    def _find_damage(self, step: int) -> str | None:
        """Returns the damage that process 0 finds; all processes get the same conclusion."""
        damage = None
        if jax.process_index() == 0:
            damage = checksums.find_damage(self.directory / str(step))
        # One conclusion for all: if some processes took another checkpoint, or raised, the others
        # would wait for them in the next collective operation.
        damaged = multihost_utils.broadcast_one_to_all(np.bool_(damage is not None))
        return (damage or "process 0 finds it damaged") if damaged else None

    def restore_latest(self, abstract_state: Any) -> tuple[Any, dict[str, Any]] | None:
        """Returns the newest readable checkpoint, or None if there are no checkpoints.

        A checkpoint that cannot be read is reported, and the one before it is tried.

        Raises:
          UserError: there are checkpoints, but none can be read.
        """
        return self._latest(lambda step: self.restore(step, abstract_state))

    def latest_shapes(self) -> tuple[int, dict[str, Any]] | None:
        """Returns the update of the newest readable checkpoint and its `shapes`, or None.

        Raises:
          UserError: see `restore_latest`.
        """
        return self._latest(lambda step: (step, self.shapes(step)))

    def _latest(self, read: Callable[[int], T]) -> T | None:
        steps = self.steps()
        for step in reversed(steps):
            try:
                return read(step)
            except UserError as error:
                self._report(f"{error}; trying the one before it")
        if steps:
            raise UserError(
                f"none of the checkpoints {steps} in {self.directory} can be read; move the folder "
                "away to start again, or give another one"
            )
        return None

    def close(self) -> None:
        """Waits for a save in progress; its checkpoint is complete if nothing is raised.

        Raises:
          UserError: the save failed; unlike in `wait`, it is raised in this process only.
        """
        with self._resources:
            try:
                if self._saving is not None and self._background.error is None:
                    self._finish()
                    self._saving = None
            finally:
                # After a failed save of several processes nothing is closed: Orbax' threads wait
                # for those of the process that failed.
                if self._background.error is None:
                    self._checkpointer.close()
                elif jax.process_count() == 1:
                    with contextlib.suppress(Exception):  # already reported
                        self._checkpointer.close()
                    self._remove_unfinished()  # it takes space on a disk that may be full
                    self._background.end()
            if self._background.error is not None and not self._is_told:
                raise self._failed(self._background.error)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.close()
        except UserError as error:
            if kind is None:
                raise
            self._report(str(error))  # the error that ended the run must be the one raised


class _Chosen:
    """Orbax' preservation policy for a function of the update."""

    def __init__(self, keeps: Callable[[int], bool]) -> None:
        self._keeps = keeps

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        return [self._keeps(checkpoint.step) for checkpoint in checkpoints]
