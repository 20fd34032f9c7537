"""The training step for batches of any number of equal microbatches, without compiling again.

A batch is k quanta of rows, a quantum being one microbatch over all devices, and k may be another
one in each update. Two programs are compiled: one adds the gradients of microbatches to a running
total, the other makes the update of it. The host calls the first one for each microbatch, and on a
CPU for each `TOGETHER` of them or as many as are left. A task whose weights depend on the examples,
such as the number of masked words, has a third program, which only adds these up: the loss is
divided by them before the backward pass.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lamb_tpu.batching.learning_rate import given_rate
from lamb_tpu.models.convolution import are_fast_in_loops
from lamb_tpu.models.norm import MOMENTS, add_moments, as_one, combine_moments
from lamb_tpu.optim.trust_ratio import compute_dtype
from lamb_tpu.parallel import accumulation, step
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.compiling import compiler_options
from lamb_tpu.parallel.exchange import Placed
from lamb_tpu.parallel.gradient_statistics import (
    NO_STATISTICS,
    PartStatistics,
    Statistics,
    check_second_moments,
)
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.parts import StatePart
from lamb_tpu.parallel.per_example import make_per_example, unmeasured
from lamb_tpu.parallel.state import PARTS, TrainState
from lamb_tpu.tasks import Sums, Task

Batch = Mapping[str, jax.Array]
Shapes = Mapping[str, jax.ShapeDtypeStruct]

# Microbatches of one call on a CPU. Its programs ask the system for their temporary memory at each
# call, and the system clears every page of it, which took a twelfth of the time with LeNet-5. Other
# devices keep their memory, and a GPU would wait for the number of turns of the loop. Networks with
# convolutions that a CPU computes slowly within loops have one microbatch in each call there too.
TOGETHER = 8


class Total(NamedTuple):
    """Sums over the microbatches of an update.

    Under shard_map all but the moments are those of each device, along a leading axis.

    Attributes:
      grads: the gradient, in float32 at least.
      loss: these microbatches' share of the loss.
      sums: the task's metric sums.
      shares: what the statistics of gradients need, see `PartStatistics.shares`; {} without.
      moments: moments of the model's BatchNorm layers, see `norm.add_moments`.
    """

    grads: Any
    loss: jax.Array
    sums: Any
    shares: Any
    moments: Any


class ChangingStep:
    """An update from a sequence of microbatches, `(state, microbatches, rate) -> (state, sums)`.

    The update is that of `step.make_train_step` for the whole batch cut into these microbatches:
    the same positions, weights, key and groups of BatchNorm. The state's buffers are donated. An
    optimizer whose learning rate is `batching.learning_rate.rate_given` gets the rate of the call.

    Args:
      task, tx, layout, backend, exchange: see `step.make_train_step`.
      state: shapes, dtypes and shardings of the state.
      microbatch: shapes, dtypes and shardings of a microbatch.
      parts, skip_nonfinite: see `step.make_update`.
      statistics: statistics of gradients, which become metrics of the update.

    Raises:
      ValueError: a part of the state lives with the rows of a batch; the optimizer has not the
        second moments that a statistic needs.
    """

    def __init__(
        self,
        task: Task,
        tx: optax.GradientTransformation,
        layout: Layout,
        state: TrainState,
        microbatch: Shapes,
        backend: str = "jit",
        exchange: Placed | None = None,
        parts: Sequence[StatePart] = PARTS,
        skip_nonfinite: bool = False,
        statistics: Statistics = NO_STATISTICS,
    ) -> None:
        for part in parts:
            if part.field(state.parts[part.name]) is not None:
                raise ValueError(f"the state's {part.name} lives with the rows of one batch size")
        self._mesh, self._is_named = layout.mesh, backend != "jit"
        self._state, self._microbatch = state, dict(microbatch)
        self._task = task
        self._backend = step.make_backend(backend, layout, exchange)
        self._tx = tx
        # The exchange of the next update; another one may be set where it depends on the state.
        self.exchange = exchange

        def finish(stage: step.Stage) -> Callable[..., tuple[TrainState, Sums]]:
            placed = step.make_backend(backend, layout, step.of_stage(exchange, stage))
            return step.make_finish(tx, placed, parts, skip_nonfinite, stage.of_optimizer)

        self._finish = finish
        # Sums are of all devices under jit. Inside shard_map they stay apart until the update.
        spread: Any = PartitionSpec(mesh_lib.batch_axes(self._mesh)) if self._is_named else None
        whole = mesh_lib.replicated(self._mesh)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
        rows, none = PartitionSpec(mesh_lib.batch_axes(self._mesh)), PartitionSpec()
        of_total = Total(spread, spread, spread, spread, none)
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        batch = mesh_lib.batch_sharding(self._mesh)

        if statistics.preconditioned:
            check_second_moments(state)
        apart_by_device = self._is_named and mesh_lib.num_batch_shards(self._mesh) > 1
        self._needs_pairs = statistics.to_optimizer and not apart_by_device
        quantum = len(next(iter(self._microbatch.values())))
        self._parts = (
            PartStatistics(
                statistics,
                self._backend,
                layout,
                quantum // mesh_lib.num_batch_shards(self._mesh) if self._is_named else quantum,
                sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            )
            if statistics
            else None
        )

        begin = self._mapped(self._begin, (specs, rows), of_total)
        traced = jax.jit(begin).trace(state, self._microbatch)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), traced.out_info
        )
        on_cpu = self._mesh.devices.flat[0].platform == "cpu"
        is_looped = on_cpu and are_fast_in_loops(traced.lower().as_text())
        self._together = TOGETHER if is_looped else 1
        apart = whole if spread is None else NamedSharding(self._mesh, spread)
        of_grads = layout.moments if spread is None else jax.tree.map(lambda _: apart, shapes.grads)
        held = Total(
            of_grads,
            *(
                jax.tree.map(lambda _, place=place: place, tree)
                for tree, place in zip(shapes[1:], (apart, apart, apart, whole), strict=True)
            ),
        )
        if spread is None and self._parts is not None:
            held = held._replace(shares=self._parts.places(whole))

        def jit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Wrapped:
            return jax.jit(function, *args, compiler_options=compiler_options(self._mesh), **kwargs)

        self.zeros = jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=held,
        )
        self._weigh = jit(
            self._mapped(self._weights, (rows,), none), in_shardings=(batch,), out_shardings=whole
        )
        self._add = jit(
            self._mapped(self._added, (specs, of_total, rows, none, none, none, none), of_total),
            in_shardings=(places, held, batch, whole, whole, whole, whole),
            out_shardings=held,
            donate_argnums=1,
        )

        @functools.cache
        def of_stage(stage: step.Stage) -> jax.stages.Wrapped:
            def updated(
                state: TrainState, total: Total, rate: jax.Array, measured: Sums
            ) -> tuple[TrainState, Sums]:
                return self.updated(state, total, rate, measured, stage)

            return jit(
                self._mapped(updated, (specs, of_total, none, none), (specs, none)),
                in_shardings=(places, held, whole, whole),
                out_shardings=(places, whole),
                donate_argnums=0,
            )

        self._update = of_stage
        self._unmeasured = unmeasured() if statistics.per_example else {}
        if statistics.per_example:
            self._per_example = jit(
                step.in_mesh(self._mesh, self._one_by_one(statistics.per_example)),
                in_shardings=(places, held.grads, batch, whole, whole),
                out_shardings=whole,
            )
        # Which weights depend on the examples follows from the task's own program.
        self._is_weighed = bool(
            jax.eval_shape(self._mapped(self._weights, (rows,), none), self._microbatch)
        )
        self._total: Total | None = None

    def __call__(
        self,
        state: TrainState,
        microbatches: Sequence[Batch],
        rate: float = math.nan,
        per_example: bool = False,
        update: int = 0,
    ) -> tuple[TrainState, Sums]:
        """Makes an update, after `update` completed ones; see the class.

        With `per_example` it takes gradients of examples one by one, if the statistics have that.

        Raises:
          ValueError: the optimizer is given halves, and an odd number of microbatches has none.
        """
        if self._needs_pairs and len(microbatches) % 2:
            raise ValueError(
                f"there are {len(microbatches)} microbatches, and the optimizer is given the "
                "gradients of the even and of the odd ones; their number must be even"
            )
        if self._total is None:
            self._total = self.zeros()
        weights, count = self.weights(microbatches), np.int32(len(microbatches))
        for first in range(0, len(microbatches), self._together):
            number = min(self._together, len(microbatches) - first)
            some = [microbatches[first + place] for place in range(number)]
            some += some[-1:] * (self._together - number)  # which no turn reads
            self._total = self._add(
                state, self._total, some, weights, np.int32(first), np.int32(number), count
            )
        measured = self._unmeasured
        if measured and per_example:
            measured = self._per_example(state, self._total.grads, microbatches[0], weights, count)
        program = self._update(self.stage(update))
        return program(state, self._total, np.float32(rate), measured)

    def stage(self, update: int) -> step.Stage:
        """Returns the stage of the update after `update` completed ones."""
        return step.stage_at(self._tx, self.exchange, update)

    def weights(self, microbatches: Sequence[Batch]) -> dict[str, jax.Array]:
        """Returns the weights of the whole batch that depend on its examples."""
        if not self._is_weighed:
            return {}
        each = [self._weigh(batch) for batch in microbatches]
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), each)

    def compile(self, update: int = 0) -> None:
        """Compiles the programs that the update after `update` completed ones needs."""
        weights: Any = {}
        if self._is_weighed:
            weights = jax.eval_shape(self._weigh, self._microbatch)
            self._weigh.lower(self._microbatch).compile()
        total = jax.eval_shape(self.zeros)
        number = jax.ShapeDtypeStruct((), np.int32)
        some = [self._microbatch] * self._together
        self._add.lower(self._state, total, some, weights, number, number, number).compile()
        rate = jax.ShapeDtypeStruct((), np.float32)
        program = self._update(self.stage(update))
        program.lower(self._state, total, rate, self._unmeasured).compile()
        if self._unmeasured:
            self._per_example.lower(
                self._state, total.grads, self._microbatch, weights, number
            ).compile()
        self._total = self.zeros()

    def _mapped(self, function: Callable[..., Any], args: Any, out: Any) -> Callable[..., Any]:
        """Returns a function of whole arrays, from one of what the step sees."""
        if not self._is_named:
            return step.in_mesh(self._mesh, function)
        # Without check_vma as in `step.make_train_step`.
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=args, out_specs=out, check_vma=False
        )

    def _weights(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the weights that depend on the examples, of a microbatch over all devices."""
        found = self._task.weights(batch)
        return self._backend.add(
            {term: weight for term, weight in found.items() if isinstance(weight, jax.Array)}
        )

    def _gradients(
        self, state: TrainState, batch: Batch, weights: Any, index: jax.Array, count: jax.Array
    ) -> tuple[Total, Any]:
        """Returns what a microbatch adds, and its moments."""
        rows = len(next(iter(batch.values())))
        divisors = self._divisors(self._backend.add(self._given(batch)), weights, count)
        positions = self._backend.positions(rows, 1)
        quantum = rows * (mesh_lib.num_batch_shards(self._mesh) if self._is_named else 1)
        grads, loss, model_state, sums = accumulation.gradients(
            self._task,
            self._backend.whole_params(state.params),
            {**state.model_state, MOMENTS: {}},
            batch,
            divisors,
            jax.random.fold_in(state.key, state.step),
            positions + index * quantum,
        )
        grads, loss, sums = jax.tree.map(
            lambda leaf: leaf.astype(compute_dtype(leaf)), (grads, loss, sums)
        )
        shares = {} if self._parts is None else self._parts.shares(grads, state, index)
        return self._apart(Total(grads, loss, sums, shares, {})), model_state.get(MOMENTS, {})

    def _given(self, batch: Batch) -> dict[str, Any]:
        """Returns the weights that follow from shapes, the same in each microbatch."""
        return {
            term: weight
            for term, weight in self._task.weights(batch).items()
            if not isinstance(weight, jax.Array)
        }

    @staticmethod
    def _divisors(given: Any, weights: Any, count: jax.Array) -> dict[str, Any]:
        """Returns the weights of the whole batch."""
        return {
            **{
                term: weight * count.astype(jnp.result_type(weight))
                for term, weight in given.items()
            },
            **weights,
        }

    def _begin(self, state: TrainState, batch: Batch) -> Total:
        """Returns a total, for its shapes."""
        weights = self._weights(batch)
        total, moments = self._gradients(state, batch, weights, jnp.int32(0), jnp.int32(1))
        return total._replace(moments=add_moments(None, moments, 0))

    def _added(
        self,
        state: TrainState,
        total: Total,
        batches: Sequence[Batch],
        weights: Any,
        first: jax.Array,
        number: jax.Array,
        count: jax.Array,
    ) -> Total:
        """Returns the total with the first `number` of these microbatches."""
        if len(batches) == 1:
            return self.added(state, total, batches[0], weights, first, count)
        each: list[Callable[[], Batch]] = [functools.partial(dict, batch) for batch in batches]

        def add(place: jax.Array, total: Total) -> Total:
            batch = lax.switch(place, each)
            return self.added(state, total, batch, weights, first + place, count)

        return lax.fori_loop(0, number, add, total)

    def added(
        self,
        state: TrainState,
        total: Total,
        batch: Batch,
        weights: Any,
        index: jax.Array,
        count: jax.Array,
    ) -> Total:
        """Returns the total with one more microbatch; the first one begins it anew."""
        new, moments = self._gradients(state, batch, weights, index, count)
        # A choice and no product: what is left of the last update may be NaN.
        grads, loss, sums, shares = jax.tree.map(
            lambda old, new: jnp.where(index == 0, new, old + new), total[:-1], new[:-1]
        )
        return Total(grads, loss, sums, shares, add_moments(total.moments, moments, index))

    def updated(
        self,
        state: TrainState,
        total: Total,
        rate: jax.Array,
        measured: Sums | None = None,
        stage: step.Stage = step.PLAIN,
    ) -> tuple[TrainState, Sums]:
        """Returns the state after the update, and the metrics with those already `measured`."""
        grads, loss, sums, shares = jax.tree.map(
            lambda leaf: leaf[0] if self._is_named else leaf, total[:-1]
        )
        model_state = combine_moments(state.model_state, as_one(total.moments))

        def measure(reduced: Any) -> tuple[Sums, Mapping[str, Any]]:
            found = dict(measured or {})
            if self._parts is None:
                return found, {}
            of_parts, given = self._parts.measured(shares, grads, reduced, state)
            return {**found, **of_parts}, given

        with given_rate(rate):
            return self._finish(stage)(state, grads, loss, model_state, sums, {}, measure)

    def _one_by_one(self, rows: int) -> Callable[..., Sums]:
        """Returns the program of the statistics from gradients one by one, on whole arrays."""
        measured = make_per_example(self._task, self._mesh, rows)

        def per_example(
            state: TrainState, grads: Any, batch: Batch, weights: Any, count: jax.Array
        ) -> Sums:
            if self._is_named:
                grads = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), grads)
            divisors = self._divisors(self._given(batch), weights, count)
            return measured(state, grads, batch, divisors, count)

        return per_example

    def _apart(self, total: Total) -> Total:
        """Adds the leading axis of devices, under shard_map."""
        return jax.tree.map(lambda leaf: leaf[None], total) if self._is_named else total
