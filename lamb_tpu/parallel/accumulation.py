"""Gradients of a large batch from microbatches, added in float32."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from lamb_tpu.models.dropout import example_positions
from lamb_tpu.models.norm import MOMENTS, combine_moments
from lamb_tpu.optim.trust_ratio import compute_dtype
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.tasks import Sums, Task
from lamb_tpu.types import Batch, Params, PyTree


def gradients(
    task: Task,
    params: Params,
    model_state: PyTree,
    batch: Batch,
    weights: Mapping[str, jax.Array],
    key: jax.Array,
    positions: jax.Array,
    steps: int = 1,
    num_shards: int = 1,
    sharding: NamedSharding | None = None,
    carried: Collection[str] = (),
) -> tuple[Any, jax.Array, Any, Sums]:
    """Returns the gradient of the loss, which is the sum of its terms, each divided by its weight.

    Each shard is cut into microbatches of n rows: row r of microbatch j is the shard's row j * n +
    r, so no example moves between devices. If rows have the order of `rows.microbatch_order`, a
    microbatch consists of consecutive examples. The sums over a microbatch are divided by the
    weights of the full batch, so examples count as in one large batch, even if the weights of
    microbatches differ.

    The groups of BatchNorm are within a microbatch, as ghost batches of the large batch. The groups
    do not depend on the number of devices. If the group size divides the microbatch size, the groups
    do not depend on the number of microbatches either. By the law of total variance the running
    averages become those of the large batch.

    Args:
      task, params, model_state: the learning problem, its parameters and other collections.
      batch: fields of shape (rows, ...).
      weights: the weight of each term of the loss: `task.weights` of the global batch. A term with
        weight 0 contributes nothing.
      key: random key of this update.
      positions: positions of the rows in the global batch, (rows,). Dropout masks are a function of
        `key` and these positions.
      steps: number of microbatches.
      num_shards, sharding: see `rows.cut`.
      carried: names of fields (rows, ...); the task returns their new values in the model state.

    Returns:
      The gradient of these rows' share of the loss, this share, the new model state with the carried
      fields of all rows, and the metric sums. With several microbatches the gradient is in float32
      or wider. Summed over devices, gradients and shares give the gradient and loss of the batch.
    """
    # Divide a term of weight 0 by infinity: the term and its gradient are then 0, not NaN.
    divisors = {term: jnp.where(weight > 0, weight, jnp.inf) for term, weight in weights.items()}

    def of(part: Batch, places: jax.Array, collections: Any) -> tuple[Any, Any]:
        def share(params: Params) -> tuple[Any, Any]:
            # Dropout reads the positions while the loss is traced.
            with example_positions(places):
                terms, (state, sums) = task.loss(params, collections, part, key)
            loss = sum(jax.tree.leaves(jax.tree.map(jnp.divide, dict(terms), divisors)))
            return loss, (loss, state, sums)

        return jax.grad(share, has_aux=True)(params)

    if steps == 1:
        grads, (loss, state, sums) = of(batch, positions, model_state)
        return grads, loss, state, sums

    def step(totals: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, Any]:
        # Each microbatch starts from the same running averages. The scan stacks the moments of the
        # microbatches, which are combined once after the scan.
        grads, (loss, state, sums) = of(*part, {**model_state, MOMENTS: {}})
        totals = jax.tree.map(
            lambda total, x: total + x.astype(total.dtype), totals, (grads, loss, sums)
        )
        return totals, (state.get(MOMENTS, {}), {name: state[name] for name in carried})

    # The carry of a scan has fixed shapes and dtypes. Sums are float32: a sum of many bfloat16
    # microbatches would lose small terms.
    parts = jax.tree.map(
        lambda field: rows_lib.cut(field, num_shards, steps, sharding), (dict(batch), positions)
    )
    rows, places = jax.tree.map(lambda field: field[0], parts)
    grads, (loss, _, sums) = jax.eval_shape(lambda: of(rows, places, {**model_state, MOMENTS: {}}))
    start = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, compute_dtype(leaf)), (grads, loss, sums)
    )
    (grads, loss, sums), (moments, stacked) = lax.scan(step, start, parts)
    state = combine_moments(model_state, moments)
    if carried:
        joined = jax.tree.map(
            lambda field: rows_lib.joined(field, num_shards, steps, sharding), stacked
        )
        state = {**state, **joined}
    return grads, loss, state, sums
