"""Checkpoints of a run: the train state and the position, saved and restored together."""

import contextlib
import copy
import functools
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
from orbax.checkpoint._src.serialization import tensorstore_utils

from lamb_tpu.cluster import distributed
from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.files import buckets, reading, writing
from lamb_tpu.store import checksums, renamed
from lamb_tpu.store.saving import Background
from lamb_tpu.types import PyTree

T = TypeVar("T")
_REMOVALS = 20  # attempts to remove unfinished checkpoints
_METADATA = "_CHECKPOINT_METADATA"  # Orbax's name for the file with a checkpoint's metadata
_REPORTED = 5  # damaged checkpoints that get a message each
_SAVE = ocp.training.save_decision_policies
_KEEP = ocp.training.preservation_policies


class Checkpoints:
    """The checkpoints of one workdir, each named by its number of completed updates.

    Saves are asynchronous: the state is copied off the devices, then threads write the copy while
    training continues. A checkpoint gets its name only when all its files and their checksums are
    written. `wait` waits until then; `failure` returns the error of a failed save. Use this class
    as a context manager, or call `close`; both wait for a save in progress. If the folder cannot be
    written, every process raises a UserError.

    Args:
      directory: folder of the checkpoints; created if it is missing.
      keep: number of newest checkpoints to keep.
      report: called with a sentence when a damaged checkpoint is skipped.
      writes: False for a reader, which must not remove a checkpoint that a run is saving.
      keep_besides: called at each save with the update of each checkpoint; returns whether to keep
        that checkpoint even if it is not among the newest.
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
        if self._in_bucket:
            _limit_retries()
        self.directory = directory if self._in_bucket else directory.resolve()
        self._report = report
        self._saving: int | None = None
        self._saved: int | None = None  # the newest update that is known to be saved
        self._is_reported = False  # whether the caller has received the error of the failed save
        self._background = Background()
        self._resources = contextlib.ExitStack()
        if writes:
            if not self._in_bucket:
                with distributed.together(), writing.checked(self.directory):
                    self.directory.mkdir(parents=True, exist_ok=True)
            self.try_out()
            if jax.process_index() == 0:
                self._remove_unfinished()  # Orbax would do it in a thread that may outlive the run
        self._check_metadata()
        self._path = self._plain_path()
        context = ocp.Context()
        # If Orbax creates directories in a thread, it reports a failure only after 300 s. Several
        # processes need the thread: none of them may raise while others wait at Orbax's barriers.
        context.asynchronous.create_directories_asynchronously = jax.process_count() > 1
        # A function, not a method: Orbax would copy a method together with this object.
        context.asynchronous.post_finalization_callback = lambda: self._seal()
        # Write JSON as one file; by default Orbax writes each number as an array.
        context.checkpointables.registry = ocp.handlers.local_registry()
        context.checkpointables.registry.add(
            ocp.handlers.JsonHandler, checkpointable_name="position"
        )
        self._checkpointer = ocp.training.Checkpointer(
            self._path,
            # The trainer decides when to save; Orbax's default saves continuously.
            save_decision_policy=_SAVE.FixedIntervalPolicy(1),
            preservation_policy=_KEEP.AnyPreservationPolicy(
                [_KEEP.LatestN(keep), _Chosen(keep_besides)]
            ),
            context=context,
        )
        # Orbax also polls JAX for a preemption, and numbers its polls by updates. They would collide with
        # the polls of `Preemption`, whose numbers stop all processes at the same poll.
        self._checkpointer._manager.reached_preemption = lambda step: False

    def _check_metadata(self) -> None:
        """Rejects a pipe or a device in place of the file that Orbax reads to list checkpoints."""
        if self._in_bucket:
            return
        for file in self.directory.glob(f"*/{_METADATA}"):
            if (kind := reading.kind(file)) not in (None, "a file"):
                raise UserError(file, ABSENT, f"is {kind}, not a file", "remove that checkpoint")

    def _plain_path(self) -> pathlib.Path:
        """Returns a path of the directory without [ ] * ?, which Orbax treats as a pattern."""
        if not reading.has_pattern(self.directory):
            return self.directory
        link = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="lamb_tpu-"))
        path = pathlib.Path(link) / "checkpoints"
        path.symlink_to(self.directory)
        return path

    def steps(self) -> list[int]:
        """Returns the completed updates of the checkpoints on disk, ascending."""
        # `Checkpointer.checkpoints` also reads a time for each checkpoint. For thousands, this takes
        # most of a second.
        return sorted(self._checkpointer._manager.all_steps())

    def _remove_unfinished(self) -> None:
        if self._in_bucket:
            with writing.checked(self.directory), buckets.plain_errors(self.directory):
                for folder in buckets.children(self.directory):
                    if not checksums.is_committed(folder):
                        buckets.remove(folder)
            return
        # Threads of a failed save may still be writing there.
        for _ in range(_REMOVALS):
            folders = list(self.directory.glob("*.orbax-checkpoint-tmp*"))
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            if not folders:
                break
            time.sleep(0.1)

    def try_out(self) -> None:
        """Writes a small file into the folder, to detect a bad disk before work is lost.

        All processes must call it. If the write fails in one, all processes raise a UserError.
        """
        with distributed.together():
            try:
                writing.try_out(self.directory)
            except OSError as error:
                raise self._gone() or UserError(
                    self.directory,
                    problem=f"cannot be written ({writing.reason(error)})",
                    remedy=self._remedy(),
                ) from None

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts saving `state` (a pytree of arrays) and `position` (JSON values) as update `step`.

        Both arguments may be changed or donated as soon as the call returns. Existing checkpoints of this
        and later updates are removed first: the run skipped them as damaged when it resumed, and they
        would count as the newest. Raises a UserError if this save or the previous save failed.
        """
        # Only one save runs at a time, and its error must be raised before the next save begins.
        self.wait()
        self.try_out()
        # Copy the list, because deleting changes the steps.
        for damaged in [there for there in self.steps() if there >= step]:
            self._checkpointer.delete(damaged)
        self._saving = step
        try:
            self._background.begin()
            with self._waiting(f"saving the checkpoint of update {step}"):
                response = self._checkpointer.save_checkpointables_async(
                    # Orbax copies arrays now but reads JSON values later in its thread.
                    step,
                    {"state": state, "position": copy.deepcopy(position)},
                )
            self._background.started(response)
        except Exception as error:  # Orbax and TensorStore raise many types of errors
            self._background.fail(error)
            raise self._failed(error) from None

    def failure(self) -> UserError | None:
        """Returns the error of a failed save as soon as it is known, without waiting."""
        error = self._background.error
        return None if error is None else self._failed(error)

    def wait(self) -> None:
        """Waits for a save in progress, and checks that its checkpoint is complete.

        All processes must call it. If the save failed, all processes raise a UserError.
        """
        if self._saving is not None:
            with distributed.together():
                self._finish()
            self._saved, self._saving = self._saving, None

    def _finish(self) -> None:
        try:
            with self._waiting(f"saving the checkpoint of update {self._saving}"):
                self._background.wait()
            if jax.process_index() == 0:
                folder = self.directory / str(self._saving)
                # Check only names: the files have just been read for their checksums.
                if (damage := checksums.find_damage(folder, contents=False)) is not None:
                    raise ValueError(damage)
        except Exception as error:
            self._background.fail(error)
            raise self._failed(error) from None

    def _waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context that reports at intervals that Orbax is waiting for the bucket."""
        if not self._in_bucket:
            return contextlib.nullcontext()
        return buckets.reporting(f"{what} in {self.directory}")

    def _failed(self, error: BaseException) -> UserError:
        self._is_reported = True
        if self._in_bucket and buckets.is_unavailable(error):
            buckets.give_up(self.directory)
        # A missing folder explains any error and needs a different remedy.
        return self._gone() or UserError(
            f"the checkpoint of update {self._saving}",
            problem=f"cannot be saved in {self.directory} ({writing.reason(error)})",
            remedy=self._remedy(),
        )

    def _gone(self) -> UserError | None:
        if self._in_bucket or self.directory.is_dir():
            return None
        return UserError(
            f"the folder of the checkpoints, {self.directory},",
            problem="no longer exists",
            remedy="put it back and start the same command again, or use another --workdir",
        )

    def _remedy(self) -> str:
        again = f"{writing.repair(self.directory)}, then start the same command again"
        # Listing may fail too, because the disk may be the one that has just failed.
        steps: list[int] | None = None
        with contextlib.suppress(OSError):
            steps = [int(path.name) for path in self._complete()]
        if steps:
            return f"{again}: the checkpoint of update {max(steps)} is safe"
        if self._saved is None:
            return f"{again}: there is no checkpoint yet" if steps == [] else again
        lost = "no longer exists" if steps == [] else "cannot be read now"
        return f"{again}: the checkpoint of update {self._saved} {lost}"

    def _complete(self) -> list[pathlib.Path]:
        if self._in_bucket:
            with buckets.plain_errors(self.directory):
                return list(filter(checksums.is_committed, buckets.children(self.directory)))
        return [
            path
            for path in self.directory.iterdir()
            if path.name.isdecimal() and (path / checksums.NAME).is_file()
        ]

    def _seal(self) -> None:
        """Adds the checksums after all files are written and before the checkpoint gets its name.

        Orbax calls this in its thread on process 0, after a barrier that follows all writes.
        """
        if jax.process_index() == 0:
            if self._in_bucket:  # a bucket cannot rename; a last file marks completion
                folder = self.directory / str(self._saving)
            else:
                # Orbax's temporary name of the checkpoint, such as 7.orbax-checkpoint-tmp.
                (folder,) = self.directory.glob(f"{self._saving}.*")
            checksums.write(folder)

    def restore(self, step: int, abstract_state: PyTree) -> tuple[Any, dict[str, Any]]:
        """Returns state and position of update `step`, with the shardings of `abstract_state`.

        `abstract_state` is a pytree of `jax.ShapeDtypeStruct`s with shardings, or a function that
        returns such a pytree and takes the result of `shapes` for this checkpoint.
        """
        return self._read(step, lambda: self._load(step, abstract_state))

    def _load(self, step: int, abstract_state: PyTree) -> tuple[Any, dict[str, Any]]:
        if callable(abstract_state):
            abstract_state = abstract_state(self._shapes(step))
        wanted = renamed.as_stored(abstract_state, self._checkpointer.metadata(step).metadata)
        loaded = self._checkpointer.load_checkpointables(step, {"state": wanted, "position": None})
        state = renamed.as_now(loaded["state"], abstract_state)
        return jax.block_until_ready(state), loaded["position"]

    def shapes(self, step: int) -> dict[str, Any]:
        """Returns the `jax.ShapeDtypeStruct`s of the state of update `step`, without random keys."""
        return self._read(step, lambda: self._shapes(step))

    def position(self, step: int) -> dict[str, Any]:
        """Returns the position of update `step`; call `shapes` first to check the checkpoint."""
        return self._checkpointer.load_checkpointables(step, {"position": None})["position"]

    def _shapes(self, step: int) -> dict[str, Any]:
        state = self._checkpointer.metadata(step).metadata
        return {
            name: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
            for name, tree in state.items()
            if name != "key"
        }

    def restore_part(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Reads some of the arrays of update `step`, with the shardings of `abstract`.

        `abstract` has some fields of the state, or some keys of dicts in these fields. Call `shapes`
        first, because this method does not check the files.
        """
        context = ocp.Context()
        # Otherwise Orbax expects the complete structure of the state.
        context.pytree.loading.partial_load = True
        with context:
            arrays = ocp.load(self._path / str(step), abstract, checkpointable_name="state")
        return jax.block_until_ready(arrays)

    def _read(self, step: int, load: Callable[[], T]) -> T:
        """Calls `load` after checking that the checkpoint of update `step` exists and is not damaged."""
        if step not in self.steps():
            there = self.steps()
            problem = f"has no checkpoint{f' of update {step}' if there else ''}"
            remedy = f"use one of {', '.join(map(str, there))}" if there else "use another run"
            raise UserError(self.directory, ABSENT, problem, remedy)
        return self._attempt(step, load)

    def _attempt(self, step: int, load: Callable[[], T]) -> T:
        """Calls `load` after comparing the files of update `step` with their checksums."""
        try:
            with self._waiting(f"reading the checkpoint of update {step}"):
                damage = self._find_damage(step)
                if damage is None:
                    return load()
        except Exception as error:  # Orbax and TensorStore raise many types of errors
            damage = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        key = f"the checkpoint of update {step} in {self.directory}"
        raise UserError(key, problem=f"cannot be read ({damage})")

    def _find_damage(self, step: int) -> str | None:
        """Returns a text in all processes if process 0 finds the checkpoint damaged, else None in all."""
        damage = None
        if jax.process_index() == 0:
            damage = checksums.find_damage(self.directory / str(step))
        # All processes must agree: if some of them took another checkpoint, or raised, the other
        # processes would wait for them in the next collective operation.
        damaged = multihost_utils.broadcast_one_to_all(np.bool_(damage is not None))
        return (damage or "process 0 finds it damaged") if damaged else None

    def restore_latest(self, abstract_state: PyTree) -> tuple[Any, dict[str, Any]] | None:
        """Returns state and position of the newest readable checkpoint; None if there are no checkpoints.

        Reports each checkpoint that cannot be read, and tries the previous checkpoint. Raises a
        UserError if there are checkpoints, but none can be read.
        """
        return self._latest(lambda step: self._load(step, abstract_state))

    def latest_shapes(self) -> tuple[int, dict[str, Any]] | None:
        """Returns update and `shapes` of the newest readable checkpoint; see `restore_latest`."""
        return self._latest(lambda step: (step, self._shapes(step)))

    def _latest(self, load: Callable[[int], T]) -> T | None:
        steps = self.steps()  # once: listing thousands repeatedly would take minutes
        for number, step in enumerate(reversed(steps), start=1):
            try:
                result = self._attempt(step, functools.partial(load, step))
                self._saved = step
                return result
            except UserError as error:
                if number <= _REPORTED:
                    self._report(f"{error}; trying the previous checkpoint")
                if number == _REPORTED and len(steps) > number:
                    self._report(
                        f"the {len(steps) - number:,} checkpoints before it are tried without a "
                        "message for each"
                    )
        if steps:
            raise UserError(
                f"none of the checkpoints {steps} in {self.directory}",
                problem="can be read",
                remedy="move the folder away to start again, or give another folder",
            )
        return None

    def close(self) -> None:
        """Waits for a save in progress; if the save failed, raises a UserError in this process only."""
        with self._resources:
            try:
                if self._saving is not None and self._background.error is None:
                    self._finish()
                    self._saved, self._saving = self._saving, None
            finally:
                # After a failed save of several processes, close nothing: Orbax's threads wait for
                # those of the failed process.
                if self._background.error is None:
                    self._checkpointer.close()
                elif jax.process_count() == 1:
                    with contextlib.suppress(Exception):  # already reported
                        self._checkpointer.close()
                    # The failed save takes space on a disk that may be full. In a bucket the next
                    # start removes it, because this start has waited for the bucket long enough.
                    if not self._in_bucket:
                        self._remove_unfinished()
            if self._background.error is not None and not self._is_reported:
                raise self._failed(self._background.error)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.close()
        except UserError as error:
            if kind is None:
                raise
            self._report(str(error))  # do not hide the error that ended the run


def _limit_retries() -> None:
    """Makes TensorStore give up on an unresponsive bucket sooner than after its default of 15 minutes.

    Orbax has no option for this, but copies these dicts into each context that it makes.
    """
    limits = {"max_retries": 5, "initial_delay": "1s", "max_delay": "16s"}
    for context in (
        tensorstore_utils._BASE_TS_CONTEXT,
        tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT,
    ):
        context.setdefault("gcs_request_retries", limits)


class _Chosen:
    """A preservation policy for Orbax, given by a function of the update."""

    def __init__(self, keeps: Callable[[int], bool]) -> None:
        self._keeps = keeps

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        return [self._keeps(checkpoint.step) for checkpoint in checkpoints]
