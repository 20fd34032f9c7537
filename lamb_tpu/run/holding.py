"""A run's training set in the memory of its devices, if it fits: `config.loop.held_share`."""

import dataclasses

import jax
import numpy as np

from lamb_tpu import data
from lamb_tpu.cluster import distributed
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.run import memory
from lamb_tpu.run.build import Run
from lamb_tpu.run.preflight import train_check


@dataclasses.dataclass(frozen=True)
class Holding:
    """A training set on the devices; `arrays` are its fields, replicated on each device."""

    run: Run
    held: data.HeldSet
    arrays: dict[str, jax.Array]

    def take(
        self, loader: data.TrainLoader, updates: int, size: int, rows: np.ndarray
    ) -> dict[str, jax.Array]:
        """Returns the indices and random choices of the next batches, split over the mesh."""
        indices, epochs = loader.take_indices(updates, size, rows)
        return self.run.shard_batch(self._drawn(indices, epochs), updates)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of the arrays that `take` returns for one update."""
        zeros = np.zeros((1, 1), np.int64)
        return self.run.abstract_like(self._drawn(zeros, zeros))

    def _drawn(self, indices: np.ndarray, epochs: np.ndarray) -> data.Batch:
        """Returns indices and choices of shape (updates, rows, ...), or (rows, ...) for one update."""
        draws = self.held.draws(indices.ravel(), epochs.ravel())
        shape = indices.shape if len(indices) > 1 else indices.shape[1:]
        return {name: value.reshape(*shape, *value.shape[1:]) for name, value in draws.items()}


def is_held(run: Run) -> bool:
    """Returns whether the training set fits into the `held_share` of an accelerator's memory."""
    return run.mesh.devices.flat[0].platform != "cpu" and memory.fits(
        data.num_bytes(run.train_set), run.spec.loop.held_share, run.mesh
    )


@dataclasses.dataclass
class Shared:
    """A training set on the devices that all runs of a process share; `holding` caches it."""

    holding: tuple[Holding | None] | None = None

    def hold(self, run: Run) -> Holding | None:
        """Calls the function `hold` for the first run, and returns its result for every run."""
        if self.holding is None:
            self.holding = (hold(run),)
        return self.holding[0]


def hold(run: Run) -> Holding | None:
    """Sends a run's training set to its devices; returns None if the set stays on the host.

    Checks each example first, because later the host does not see the batches.
    """
    held = data.held_set(run.train_set) if is_held(run) else None
    if held is None:
        return None
    with distributed.together():
        train_check(run)(held.fields(), np.arange(len(run.train_set)))
    sharding = mesh_lib.replicated(run.mesh)
    # Each process sends its copy; `identity.check_data` has compared the copies.
    arrays: dict[str, jax.Array] = {
        name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        for name, array in held.arrays.items()
    }
    return Holding(run, held, arrays)
