"""The order of the rows of a batch: the examples of each device in each microbatch.

A batch of `steps * num_shards * n` examples is cut into `steps` microbatches and split over
`num_shards` devices. Example `(microbatch * num_shards + shard) * n + row` is row
`microbatch * n + row` of the shard:

- a microbatch consists of consecutive examples, the same for any number of devices;
- within a microbatch each device has consecutive examples;
- no example moves between devices when the batch is cut into microbatches.

`cut` and `joined` follow this order within a step. The host calls `local_rows`, `local_examples` and
`shard_batch`.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lamb_tpu.parallel.mesh import batch_sharding, num_batch_shards, stacked_sharding


def microbatch_order(batch_size: int, num_shards: int, steps: int) -> np.ndarray:
    """Returns the index of the example in each row of the array that is split over a mesh.

    The result has the shape (batch_size,). `steps` is the number of microbatches, and
    `num_shards * steps` divides `batch_size`.

    >>> microbatch_order(8, 2, 2)
    array([0, 1, 4, 5, 2, 3, 6, 7])
    """
    # From the axes (microbatch, shard, row) to (shard, microbatch, row).
    return np.arange(batch_size).reshape(steps, num_shards, -1).swapaxes(0, 1).ravel()


def positions(rows: int, num_shards: int, steps: int, shard: jax.Array | None = None) -> jax.Array:
    """Returns the positions in the global batch of the rows that a step sees, int32 (rows,).

    Dropout masks are functions of these positions, so the number of devices does not change the masks.

    >>> positions(8, 2, 2).tolist(), positions(4, 2, 2, shard=jnp.int32(1)).tolist()
    ([0, 1, 4, 5, 2, 3, 6, 7], [2, 3, 6, 7])

    With `shard`, the rows are those of the device with this index; None: the rows of all devices.
    """
    if shard is None:
        return jnp.asarray(microbatch_order(rows, num_shards, steps), jnp.int32)
    within = rows // steps
    starts = jnp.arange(steps, dtype=jnp.int32)[:, None] * (num_shards * within)
    return (starts + (shard * within + jnp.arange(within, dtype=jnp.int32))).ravel()


def later(first: jax.Array, index: jax.Array, microbatch_size: int) -> jax.Array:
    """Returns the positions of rows in microbatch `index`, from their positions in microbatch 0.

    `microbatch_size` is the number of examples of a microbatch on all devices.

    >>> later(positions(2, 2, 1, shard=jnp.int32(1)), jnp.int32(1), 4).tolist()
    [6, 7]
    """
    return first + index * microbatch_size


def cut(
    field: jax.Array, num_shards: int, steps: int, sharding: NamedSharding | None = None
) -> jax.Array:
    """Cuts rows into microbatches, from (rows, ...) to (steps, rows / steps, ...).

    Args:
      field: rows in the order of `microbatch_order`.
      num_shards: under jit, the number of devices over which the rows are split; inside shard_map,
        1, because the rows are those of one device.
      steps: number of microbatches.
      sharding: under jit, the sharding of a batch; None inside shard_map.
    """
    # From (shards * microbatches * rows, ...) to (microbatches, shards * rows, ...). The axis of
    # shards stays in front of the rows, so no row moves between devices.
    rows = field.shape[0] // (num_shards * steps)
    field = field.reshape(num_shards, steps, rows, *field.shape[1:])
    field = jnp.moveaxis(field, 1, 0).reshape(steps, num_shards * rows, *field.shape[3:])
    if sharding is None:
        return field
    # The axis of microbatches is not split: every device has rows of each microbatch.
    spec = PartitionSpec(None, *sharding.spec)
    return lax.with_sharding_constraint(field, sharding.update(spec=spec))


def joined(
    field: jax.Array, num_shards: int, steps: int, sharding: NamedSharding | None = None
) -> jax.Array:
    """Inverts `cut`: joins the rows of microbatches, from (steps, rows / steps, ...) to (rows, ...)."""
    field = field.reshape(steps, num_shards, -1, *field.shape[2:])
    field = jnp.moveaxis(field, 0, 1).reshape(-1, *field.shape[3:])
    return field if sharding is None else lax.with_sharding_constraint(field, sharding)


@functools.cache  # called for each update
def local_rows(batch_size: int, mesh: Mesh) -> np.ndarray:
    """Returns the indices of the distinct rows of a global array on this process's devices, ascending.

    On a mesh that follows a torus, the indices need not be consecutive. If a mesh axis that does not
    split the batch crosses processes, several processes hold the same rows.
    """
    devices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    # (start, stop, step) of each device's rows; a set, because replicas hold the same rows.
    held = {index[0].indices(batch_size) for index in devices.values() if index is not None}
    rows = np.concatenate([np.arange(*bounds) for bounds in sorted(held)])
    rows.setflags(write=False)  # the next caller gets the same array
    return rows


def local_examples(batch_size: int, mesh: Mesh, steps: int = 1) -> np.ndarray:
    """Returns the indices of the examples of a batch that this process reads.

    The indices are in the order of `local_rows`; `steps` is the number of microbatches.
    """
    order = microbatch_order(batch_size, num_batch_shards(mesh), steps)
    return order[local_rows(batch_size, mesh)]


def shard_batch(
    batch: Mapping[str, np.ndarray], batch_size: int, mesh: Mesh, updates: int = 1
) -> dict[str, jax.Array]:
    """Returns a global batch of `batch_size` rows, split over the batch axes.

    The fields of `batch` are of shape (rows, ...) with the rows of `local_rows`; for the batches of
    several updates, they are of shape (updates, rows, ...).
    """
    sharding, rows = stacked_sharding(mesh, updates), local_rows(batch_size, mesh)
    axis = int(updates > 1)  # the axis of rows

    def place(value: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # the batch is split along its first axis
            # `index` is a slice of the global batch, but `value` has only the rows of this process.
            # A device's rows are consecutive in the global batch and `rows` are ascending, so the
            # device's rows are consecutive in `value` too.
            of_rows = index[axis]
            start = np.searchsorted(rows, of_rows.start or 0)
            stop = batch_size if of_rows.stop is None else of_rows.stop
            here = slice(start, start + stop - (of_rows.start or 0))
            return value[:, here] if axis else value[here]

        shape = (*value.shape[:axis], batch_size, *value.shape[axis + 1 :])
        return jax.make_array_from_callback(shape, sharding, part)

    return {name: place(value) for name, value in batch.items()}
