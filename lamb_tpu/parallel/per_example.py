"""The variance of per-example gradients in an update, for the norm and inner-product tests."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from lamb_tpu.batching import variance
from lamb_tpu.parallel import accumulation
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.tasks import Sums, Task
from lamb_tpu.types import Batch, PyTree

NAMES = (variance.VARIANCE, variance.INNER_PRODUCT, variance.ORTHOGONAL, variance.GRAD_SQ)
# Largest memory for per-example gradients on a device; if these need more, they are computed in chunks.
CHUNK_BYTES = 256 * 2**20


def make_per_example(
    task: Task, mesh: Mesh, rows: int, chunk_bytes: int = CHUNK_BYTES
) -> Callable[..., Sums]:
    """Returns `(state, grads, microbatch, weights, count) -> metrics`, for use under jit.

    The function takes the gradient of each of the first `rows` examples of an update's batch, at the
    parameters before the update and with the dropout masks of the update (under threefry2x32). An
    example's gradient is its contribution to the gradient G of the full batch, times the number of
    examples in the batch. The metric `variance` is the variance of the examples' gradients,
    `inner_product_variance` the variance of their inner products with G, and `orthogonal_variance`
    the variance of their components orthogonal to G. `grad_sq` is the squared norm of G. See
    `batching.variance`.

    The examples must be independent, which BatchNorm violates, and no array other than the batch
    may be split over devices.

    Args:
      task: the learning problem; its model names no mesh axes.
      mesh: the mesh over all devices.
      rows: number of examples: at most the size of a microbatch, and a multiple of the number of
        devices.
      chunk_bytes: largest memory for per-example gradients on a device.
    """
    shards = mesh_lib.num_batch_shards(mesh)
    sharding = mesh_lib.batch_sharding(mesh)

    def metrics(
        state: TrainState,
        grads: PyTree,
        microbatch: Mapping[str, jax.Array],
        weights: Mapping[str, jax.Array],
        count: jax.Array,
    ) -> Sums:
        examples = (len(next(iter(microbatch.values()))) * count).astype(jnp.float32)
        key = jax.random.fold_in(state.key, state.step)

        def gradient(batch: Batch, positions: jax.Array) -> Any:
            found, *_ = accumulation.gradients(
                task, state.params, state.model_state, batch, weights, key, positions
            )
            return jax.tree.map(lambda g: examples * g.astype(jnp.float32), found)

        taken = {name: field[:rows] for name, field in microbatch.items()}
        taken = lax.with_sharding_constraint(taken, sharding)
        positions = rows_lib.positions(rows, shards, 1)
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
            each = lax.map(
                sums,
                jax.tree.map(
                    lambda field: rows_lib.cut(field, shards, chunks, sharding), (taken, positions)
                ),
            )
            total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), each)
        one_weight = jnp.ones((), jnp.float32)
        return {name: (value, one_weight) for name, value in variance.statistics(total).items()}

    return metrics


def unmeasured() -> dict[str, Any]:
    """Returns the per-example metrics of an update that does not measure them: pairs (0, 0)."""
    # NumPy scalars: jit treats them as equal in all processes.
    return {name: (np.float32(0), np.float32(0)) for name in NAMES}


def _chunks(rows: int, bytes_each: int, most: int) -> int:
    """Returns the least number of equal chunks that have at most `most` bytes or a single row each."""
    return next(
        chunks
        for chunks in range(1, rows + 1)
        if rows % chunks == 0 and (chunks == rows or rows // chunks * bytes_each <= most)
    )
