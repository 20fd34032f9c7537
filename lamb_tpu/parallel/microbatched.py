"""The functions of an update that adds up the gradients of its microbatches in a running total.

Two steps use these functions: the host's loop over microbatches, see `changing.ChangingStep`, and
the single program for a constant batch with statistics of gradients, see `Microbatched.at_once`.
Like those in `update`, the functions see all rows under jit and one device's rows inside shard_map.
`Microbatched.mapped` turns them into functions of global arrays.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lamb_tpu.kernels.convolution import are_fast_in_loops
from lamb_tpu.models.norm import MOMENTS, add_moments, as_one, combine_moments
from lamb_tpu.optim.trust_ratio import compute_dtype
from lamb_tpu.parallel import accumulation, step, update
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel.components import StateComponent
from lamb_tpu.parallel.exchange import ShardedExchange
from lamb_tpu.parallel.gradient_statistics import (
    NO_STATISTICS,
    MicrobatchStatistics,
    Statistics,
    check_second_moments,
)
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.per_example import make_per_example, unmeasured
from lamb_tpu.parallel.state import PARTS, TrainState
from lamb_tpu.parallel.update import Batch, Gradients, row_major
from lamb_tpu.tasks import Sums, Task
from lamb_tpu.types import PyTree

REPLICATED = PartitionSpec()
Shapes = Mapping[str, jax.ShapeDtypeStruct]


class Microbatched:
    """An update as separate functions: `added` for each microbatch, `one_by_one`, and `updated`.

    `one_by_one` is optional and measures per-example gradients. The result is that of
    `update.make_update` for the full batch cut into these microbatches, because positions, weights,
    key and groups of BatchNorm are the same.

    Args:
      task, tx, layout, backend, exchange: see `step.make_train_step`.
      state, microbatch: shapes, dtypes and shardings of the state and of a microbatch.
      parts, skip_nonfinite: see `update.make_update`.
      statistics: statistics of gradients, which become metrics of the update.
      optimizer_at: takes a learning rate, a traced scalar, and returns the optimizer; the state of
        this optimizer has the same structure as that of `tx`. None: `tx` has a schedule, and the
        rate that a call gets is ignored.

    Attributes:
      specs, rows, of_total: shard_map's specs of the state, of rows and of a total.
      places, held, batch, replicated: shardings of the state, of a total between programs, of rows,
        and of scalars.
      unmeasured: per-example metrics of an update that takes no per-example gradients.

    Raises:
      ValueError: a component of the state has a value for each row of a batch, or the optimizer
        lacks the second moments that a statistic needs.
    """

    def __init__(
        self,
        task: Task,
        tx: optax.GradientTransformation,
        layout: Layout,
        state: TrainState,
        microbatch: Shapes,
        backend: str = "jit",
        exchange: ShardedExchange | None = None,
        parts: Sequence[StateComponent] = PARTS,
        skip_nonfinite: bool = False,
        statistics: Statistics = NO_STATISTICS,
        optimizer_at: Callable[[jax.Array], optax.GradientTransformation] | None = None,
    ) -> None:
        for part in parts:
            if part.field(state.parts[part.name]) is not None:
                raise ValueError(
                    f"the state component {part.name!r} has a value for each row of the batch; do not "
                    "combine it with a batch that changes or with statistics of gradients"
                )
        if statistics.preconditioned:
            check_second_moments(state)
        self.mesh, self.is_named = layout.mesh, backend != "jit"
        self.state, self.microbatch = state, dict(microbatch)
        self.tx, self.statistics = tx, statistics
        # The exchange of the next update. If an exchange depends on the state, the host replaces it.
        self.exchange = exchange
        self._make_backend = functools.partial(step.make_backend, backend, layout)
        self._task, self._backend = task, self._make_backend(exchange)
        rows, shards = len(next(iter(microbatch.values()))), mesh_lib.num_batch_shards(self.mesh)
        size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        part_rows = rows // shards if self.is_named else rows
        self._measures = (
            MicrobatchStatistics(statistics, self._backend, layout, part_rows, size)
            if statistics
            else None
        )
        self._parts, self._skip_nonfinite, self._optimizer_at = parts, skip_nonfinite, optimizer_at
        self.specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
        self.places = jax.tree.map(lambda leaf: leaf.sharding, state)
        self.rows = PartitionSpec(mesh_lib.batch_axes(self.mesh))
        # Under jit the sums in a total are over all devices. Inside shard_map each device has
        # separate sums, which are added up at the update.
        spread: list[Any] = [self.rows] * 4 + [REPLICATED] * 3
        self.of_total = Gradients(*spread) if self.is_named else None
        self.replicated = whole = mesh_lib.replicated(self.mesh)
        self.batch = mesh_lib.batch_sharding(self.mesh)
        apart: Any = NamedSharding(self.mesh, self.rows)
        shares = self._measures.places(whole) if self._measures else {}
        held: list[Any] = [layout.moments, whole, whole, shares, whole, whole, whole]
        self.held = Gradients(*([apart] * 4 + [whole] * 3 if self.is_named else held))
        self.unmeasured = unmeasured() if statistics.per_example else {}

    @functools.cached_property
    def begun(self) -> jax.stages.Traced:
        """The traced program that computes the total of one microbatch."""
        begin = self.mapped(self.begin, (self.specs, self.rows), self.of_total)
        return jax.jit(begin).trace(self.state, self.microbatch)

    @functools.cached_property
    def is_fast_in_loops(self) -> bool:
        """False if convolutions are slow within a loop, which occurs only on a CPU."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return not on_cpu or are_fast_in_loops(self.begun.lower().as_text())

    def at_once(self, steps: int, stage: step.Stage, measures: bool) -> step.Step:
        """Returns the update of a batch of `steps` microbatches, `(state, batch) -> (state, sums)`.

        The update is a function of global arrays, to be compiled as one program for a stage (see
        `step.stage_at`). The rows of a batch are in the order of `rows.microbatch_order`. If
        `measures` is True, the update takes per-example gradients, which the statistics must include.
        """
        each = PartitionSpec(None, *self.rows)
        # Unroll the loop if a CPU would compute convolutions slowly within it.
        accumulate = functools.partial(
            self._accumulated, unroll=1 if self.is_fast_in_loops else steps
        )
        accumulated = self.mapped(accumulate, (self.specs, each), (REPLICATED, self.of_total))
        finish = self.updating(stage)
        shards = mesh_lib.num_batch_shards(self.mesh)

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
            microbatches = jax.tree.map(
                lambda field: rows_lib.cut(field, shards, steps, self.batch), dict(batch)
            )
            weights, total = accumulated(state, microbatches)
            total = lax.with_sharding_constraint(total, self.held)
            # Keep the compiler from fusing operations before this point with operations after it, so
            # that the update compiles to the same code as in two separate programs.
            total = lax.optimization_barrier(row_major(total, self.mesh))
            measured = jax.tree.map(jnp.asarray, self.unmeasured)
            if measures:
                first = jax.tree.map(lambda field: field[0], microbatches)
                measured = self.one_by_one(state, total.grads, first, weights, jnp.int32(steps))
            return finish(state, total, jnp.float32(jnp.nan), measured)

        return train_step

    def mapped(self, function: Callable[..., Any], args: Any, out: Any) -> Callable[..., Any]:
        """Turns a function of the arrays that the step sees into a function of global arrays."""
        if not self.is_named:
            return step.in_mesh(self.mesh, function)
        # See `step.make_train_step` for check_vma.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=args, out_specs=out, check_vma=False
        )

    def updating(self, stage: step.Stage) -> Callable[..., tuple[TrainState, Sums]]:
        """Returns the function `(state, total, rate, measured) -> (state, sums)` on global arrays."""
        arguments = (self.specs, self.of_total, REPLICATED, REPLICATED)
        updated = functools.partial(self.updated, stage=stage)
        return self.mapped(updated, arguments, (self.specs, REPLICATED))

    def weigh(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the example-dependent weights of a microbatch over all devices."""
        found = self._task.weights(batch)
        return self._backend.add(
            {term: weight for term, weight in found.items() if isinstance(weight, jax.Array)}
        )

    def _gradients(
        self, state: TrainState, batch: Batch, weights: Any, index: jax.Array, count: jax.Array
    ) -> Gradients:
        """Returns the gradients of one microbatch, with the moments of BatchNorm as the model state.

        Under shard_map all arrays except the moments have a leading axis of devices, of length 1.
        """
        rows = len(next(iter(batch.values())))
        divisors = self._divisors(self._backend.add(self._given(batch)), weights, count)
        positions = self._backend.positions(rows, 1)
        granularity = rows * (mesh_lib.num_batch_shards(self.mesh) if self.is_named else 1)
        grads, loss, model_state, sums = accumulation.gradients(
            self._task,
            self._backend.whole_params(state.params),
            {**state.model_state, MOMENTS: {}},
            batch,
            divisors,
            jax.random.fold_in(state.key, state.step),
            rows_lib.later(positions, index, granularity),
        )
        grads, loss, sums = jax.tree.map(
            lambda leaf: leaf.astype(compute_dtype(leaf)), (grads, loss, sums)
        )
        shares = {} if self._measures is None else self._measures.shares(grads, state, index)
        found = grads, loss, sums, shares
        if self.is_named:
            found = jax.tree.map(lambda leaf: leaf[None], found)
        return Gradients(*found, model_state.get(MOMENTS, {}), {}, {})

    def _given(self, batch: Batch) -> dict[str, Any]:
        """Returns the loss weights that depend only on shapes, and so are equal in all microbatches."""
        return {
            term: weight
            for term, weight in self._task.weights(batch).items()
            if not isinstance(weight, jax.Array)
        }

    @staticmethod
    def _divisors(given: Any, weights: Any, count: jax.Array) -> dict[str, Any]:
        """Returns all loss weights of the full batch; `given` has weights of one of `count` microbatches."""
        return {
            **{
                term: weight * count.astype(jnp.result_type(weight))
                for term, weight in given.items()
            },
            **weights,
        }

    def begin(self, state: TrainState, batch: Batch) -> Gradients:
        """Returns the total of one microbatch; callers use only its shapes and dtypes."""
        weights = self.weigh(batch)
        total = self._gradients(state, batch, weights, jnp.int32(0), jnp.int32(1))
        return total._replace(model_state=add_moments(None, total.model_state, 0))

    def _accumulated(self, state: TrainState, batches: Batch, unroll: int) -> tuple[Any, Gradients]:
        """Returns summed loss weights and gradients of microbatches stacked as (count, rows, ...)."""
        count = len(next(iter(batches.values())))
        weights = jax.tree.map(lambda each: jnp.sum(each, axis=0), lax.map(self.weigh, batches))
        shapes = jax.eval_shape(self.begin, state, {k: v[0] for k, v in batches.items()})
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(total: Gradients, each: tuple[jax.Array, Batch]) -> tuple[Gradients, None]:
            index, batch = each
            return self.added(state, total, batch, weights, index, jnp.int32(count)), None

        places = jnp.arange(count, dtype=jnp.int32)
        total, _ = lax.scan(add, zeros, (places, batches), unroll=unroll)
        return weights, total

    def added(
        self,
        state: TrainState,
        total: Gradients,
        batch: Batch,
        weights: Any,
        index: jax.Array,
        count: jax.Array,
    ) -> Gradients:
        """Adds microbatch `index` to the total; microbatch 0 discards the previous total."""
        new = self._gradients(state, batch, weights, index, count)
        # Use `where`, not multiplication: the stale total may hold NaN, and NaN * 0 is NaN.
        grads, loss, sums, shares = jax.tree.map(
            lambda old, new: jnp.where(index == 0, new, old + new), total[:4], new[:4]
        )
        moments = add_moments(total.model_state, new.model_state, index)
        return Gradients(grads, loss, sums, shares, moments, {}, {})

    def updated(
        self,
        state: TrainState,
        total: Gradients,
        rate: jax.Array,
        measured: Sums,
        stage: step.Stage,
    ) -> tuple[TrainState, Sums]:
        """Returns the state after the update, and the metrics including `measured`."""
        grads, loss, sums, shares = jax.tree.map(
            lambda leaf: leaf[0] if self.is_named else leaf, total[:4]
        )
        model_state = combine_moments(state.model_state, as_one(total.model_state))
        gradients = Gradients(grads, loss, sums, shares, model_state, {}, measured)
        backend = self._make_backend(step.of_stage(self.exchange, stage))
        tx = self.tx if self._optimizer_at is None else self._optimizer_at(rate)
        sent = update.exchange(tx, backend, state, gradients, stage.of_optimizer)
        return update.apply(
            tx, backend, self._parts, state, gradients, sent, self._measures, self._skip_nonfinite
        )

    def one_by_one(
        self, state: TrainState, grads: PyTree, batch: Batch, weights: Any, count: jax.Array
    ) -> Sums:
        """Returns the statistics of per-example gradients, on global arrays."""
        if self.is_named:
            grads = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), grads)
        divisors = self._divisors(self._given(batch), weights, count)
        measured = make_per_example(self._task, self.mesh, self.statistics.per_example)
        return step.in_mesh(self.mesh, measured)(state, grads, batch, divisors, count)
