"""The variance of single examples' gradients in an update, for the norm and inner-product tests."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.batching import variance
from lamb_tpu.parallel import accumulation
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.tasks import Sums, Task

NAMES = (variance.VARIANCE, variance.INNER_PRODUCT, variance.ORTHOGONAL, variance.GRAD_SQ)
# Most memory for the gradients of examples on a device; those of more are taken one after another.
CHUNK_BYTES = 256 * 2**20


def make_per_example(
    task: Task, mesh: Mesh, rows: int, chunk_bytes: int = CHUNK_BYTES
) -> Callable[..., Sums]:
    """Returns `(state, grads, microbatch, weights, count) -> metrics`, for use under jit.

    It takes the gradients of the first `rows` examples of an update's batch one by one, at the
    parameters before the update and with the dropout of the update (under threefry2x32). Of these
    examples are `variance` and, along the gradient of the whole batch, `inner_product_variance` and
    `orthogonal_variance`; `grad_sq` is that of the whole batch. See `batching.variance`. An
    example's gradient is what it adds to the batch's, times the number of examples.

    The examples must not depend on each other, as by BatchNorm, and only the batch may be split.

    Args:
      task: the learning problem; its model names no mesh axes.
      mesh: the mesh over all devices.
      rows: number of examples, at most a microbatch's, that divides over the devices.
      chunk_bytes: memory for the gradients of examples on a device.
    """
    shards = mesh_lib.num_batch_shards(mesh)
    sharding = mesh_lib.batch_sharding(mesh)

    def metrics(
        state: TrainState,
        grads: Any,
        microbatch: Mapping[str, jax.Array],
        weights: Mapping[str, jax.Array],
        count: jax.Array,
    ) -> Sums:
        examples = (len(next(iter(microbatch.values()))) * count).astype(jnp.float32)
        key = jax.random.fold_in(state.key, state.step)

        def gradient(batch: Mapping[str, jax.Array], positions: jax.Array) -> Any:
            found, *_ = accumulation.gradients(
                task, state.params, state.model_state, batch, weights, key, positions
            )
            return jax.tree.map(lambda g: examples * g.astype(jnp.float32), found)

        taken = {name: field[:rows] for name, field in microbatch.items()}
        taken = lax.with_sharding_constraint(taken, sharding)
        positions = jnp.arange(rows, dtype=jnp.int32)
        mean = jax.tree.map(lambda g: g / rows, gradient(taken, positions))

        def one(example: Mapping[str, jax.Array], position: jax.Array) -> Any:
            return gradient({name: value[None] for name, value in example.items()}, position[None])

        def sums(chunk: tuple[Any, jax.Array]) -> variance.VarianceSums:
            return variance.sums(jax.vmap(one)(*chunk), mean, direction=grads)

        size = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))
        chunks = _chunks(rows // shards, size, chunk_bytes)
        if chunks == 1:
            total = sums((taken, positions))
        else:
            each = lax.map(sums, jax.tree.map(cut(chunks), (taken, positions)))
            total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), each)
        one_weight = jnp.ones((), jnp.float32)
        return {name: (value, one_weight) for name, value in variance.statistics(total).items()}

    def cut(chunks: int) -> Callable[[jax.Array], jax.Array]:
        # Each device cuts up its own examples, as in `accumulation.gradients`.
        spec = PartitionSpec(None, *sharding.spec)

        def cut_field(field: jax.Array) -> jax.Array:
            field = field.reshape(shards, chunks, -1, *field.shape[1:])
            field = jnp.moveaxis(field, 1, 0).reshape(chunks, -1, *field.shape[3:])
            return lax.with_sharding_constraint(field, sharding.update(spec=spec))

        return cut_field

    return metrics


def unmeasured() -> dict[str, Any]:
    """Returns the metrics of an update that does not take gradients one by one: pairs of 0."""
    # Numbers of NumPy, which are the same in each process.
    return {name: (np.float32(0), np.float32(0)) for name in NAMES}


def _chunks(rows: int, bytes_each: int, most: int) -> int:
    """The smallest divisor of a device's rows whose chunks have at most so many bytes."""
    return next(
        chunks
        for chunks in range(1, rows + 1)
        if rows % chunks == 0 and (chunks == rows or rows // chunks * bytes_each <= most)
    )
