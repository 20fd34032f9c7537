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
from lamb_tpu.tasks import Sums, Task

Batch = Mapping[str, jax.Array]


def gradients(
    task: Task,
    params: Any,
    model_state: Any,
    batch: Batch,
    weights: Mapping[str, jax.Array],
    key: jax.Array,
    positions: jax.Array,
    steps: int = 1,
    num_shards: int = 1,
    sharding: NamedSharding | None = None,
    carried: Collection[str] = (),
) -> tuple[Any, jax.Array, Any, Sums]:
    """Returns the gradient of the loss, which is the sum over its terms of sum / weight.

    Each shard is cut into microbatches of n rows: row r of microbatch j is the shard's row
    j * n + r, so no example moves between devices. In the order of `mesh.microbatch_order` a
    microbatch is a run of consecutive examples. Its sums are divided by the weights of the whole
    batch, so that examples count as in one large batch even if microbatches have unequal weights.

    BatchNorm takes its groups within a microbatch, as ghost batches of the large one. They are the
    same for every number of devices, and groups that divide a microbatch are the same for every
    number of microbatches. The running averages become those of the large batch, by the law of
    total variance.

    Args:
      task: the learning problem.
      params: its parameters.
      model_state: the model's other collections.
      batch: fields of shape (rows, ...).
      weights: the weight of each term of the loss: `task.weights` of the global batch. A term with
        weight 0 contributes nothing.
      key: random key of this update.
      positions: positions of the rows in the global batch, (rows,); with `key` they decide dropout.
      steps: number of microbatches.
      num_shards: number of equal runs of rows into which the batch is split over devices, under
        jit; 1 inside shard_map, where the rows are one device's.
      sharding: sharding of a batch, under jit.
      carried: names of the fields (rows, ...) of which the task returns a new value in the model
        state.

    Returns:
      (gradients, in float32 at least where there are several microbatches; these rows' share of
      the loss; the new model state, with the carried fields of all rows; metric sums). Shares, like
      gradients, add up over devices.
    """
    # Over infinity a term without weight is 0, and its gradient too; over 0 it would be NaN.
    divisors = {term: jnp.where(weight > 0, weight, jnp.inf) for term, weight in weights.items()}

    def of(part: Batch, places: jax.Array, collections: Any) -> tuple[Any, Any]:
        def share(params: Any) -> tuple[Any, Any]:
            # Set while the loss is traced; dropout reads them.
            with example_positions(places):
                terms, (state, sums) = task.loss(params, collections, part, key)
            loss = sum(jax.tree.leaves(jax.tree.map(jnp.divide, dict(terms), divisors)))
            return loss, (loss, state, sums)

        return jax.grad(share, has_aux=True)(params)

    if steps == 1:
        grads, (loss, state, sums) = of(batch, positions, model_state)
        return grads, loss, state, sums

    def cut(field: jax.Array) -> jax.Array:
        # (shards x microbatches x rows, ...) to (microbatches, shards x rows, ...). The axis of
        # shards stays in front of the rows, so each device cuts up its own.
        rows = field.shape[0] // (num_shards * steps)
        field = field.reshape(num_shards, steps, rows, *field.shape[1:])
        field = jnp.moveaxis(field, 1, 0).reshape(steps, num_shards * rows, *field.shape[3:])
        if sharding is None:
            return field
        # The axis of microbatches is whole: every device takes part in each of them.
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return lax.with_sharding_constraint(field, sharding.update(spec=spec))

    def joined(field: jax.Array) -> jax.Array:
        # The other way round.
        field = field.reshape(steps, num_shards, -1, *field.shape[2:])
        field = jnp.moveaxis(field, 0, 1).reshape(-1, *field.shape[3:])
        return field if sharding is None else lax.with_sharding_constraint(field, sharding)

    def step(totals: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, Any]:
        # Each microbatch starts from the same running averages. Its moments are stacked by the scan
        # and combined once, behind it.
        grads, (loss, state, sums) = of(*part, {**model_state, MOMENTS: {}})
        totals = jax.tree.map(
            lambda total, x: total + x.astype(total.dtype), totals, (grads, loss, sums)
        )
        return totals, (state.get(MOMENTS, {}), {name: state[name] for name in carried})

    # A scan needs a carry of fixed shapes and dtypes, so these are known before it begins. Sums are
    # float32: those of many bfloat16 microbatches would lose small terms.
    parts = jax.tree.map(cut, (dict(batch), positions))
    rows, places = jax.tree.map(lambda field: field[0], parts)
    grads, (loss, _, sums) = jax.eval_shape(lambda: of(rows, places, {**model_state, MOMENTS: {}}))

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, compute_dtype(leaf))

    start = jax.tree.map(zeros, (grads, loss, sums))
    (grads, loss, sums), (moments, stacked) = lax.scan(step, start, parts)
    state = combine_moments(model_state, moments)
    if carried:
        state = {**state, **jax.tree.map(joined, stacked)}
    return grads, loss, state, sums
