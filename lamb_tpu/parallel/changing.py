"""The training step for batches of any number of equal microbatches, without compiling for each number.

The batch size is a multiple of the granularity, which is the number of rows of one microbatch over
all devices. The multiple may differ from update to update. Two programs are compiled: one adds the
gradients of microbatches to a running total, the other applies the total. The host calls the first
program for each microbatch, or on a CPU for each group of at most `TOGETHER` microbatches.

If the weights of a task depend on the examples, such as the number of masked words, a third program
first computes the weights of each microbatch, because the loss is divided by their sum before the
backward pass.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step
from lamb_tpu.parallel.compiling import compiler_options
from lamb_tpu.parallel.microbatched import REPLICATED, Microbatched
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.parallel.update import Batch, Gradients
from lamb_tpu.tasks import Sums

# Largest number of microbatches in one call on a CPU. Each call on a CPU allocates its temporary
# memory from the system, which clears every page; with LeNet-5 this took a twelfth of a step's time.
# Accelerators reuse their memory, and a GPU would wait until it knows the number of iterations of
# the loop. If a CPU would compute convolutions slowly within a loop, each call has one microbatch.
TOGETHER = 8


class ChangingStep(Microbatched):
    """An update from a sequence of microbatches, `(state, microbatches, rate) -> (state, sums)`.

    The state's buffers are donated. The arguments are those of `Microbatched`.
    """

    _total: Gradients | None = None

    @functools.cached_property
    def together(self) -> int:
        """Number of microbatches in a call of the program that adds gradients."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return TOGETHER if on_cpu and self.is_fast_in_loops else 1

    def _jit(self, function: Callable[..., Any], **kwargs: Any) -> jax.stages.Wrapped:
        return jax.jit(function, compiler_options=compiler_options(self.mesh), **kwargs)

    @functools.cached_property
    def zeros(self) -> jax.stages.Wrapped:
        """Program that returns a total of zeros."""
        shapes = self.begun.out_info
        return self._jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=self.held,
        )

    @functools.cached_property
    def _weigh(self) -> jax.stages.Wrapped | None:
        """Program that returns a microbatch's loss weights; None if no weight depends on examples."""
        weigh = self.mapped(self.weigh, (self.rows,), REPLICATED)
        if not jax.eval_shape(weigh, self.microbatch):
            return None
        return self._jit(weigh, in_shardings=(self.batch,), out_shardings=self.replicated)

    @functools.cached_property
    def _add(self) -> jax.stages.Wrapped:
        arguments = (self.specs, self.of_total, self.rows, *[REPLICATED] * 4)
        return self._jit(
            self.mapped(self._added, arguments, self.of_total),
            in_shardings=(self.places, self.held, self.batch, *[self.replicated] * 4),
            out_shardings=self.held,
            donate_argnums=1,
        )

    @functools.cached_property
    def _update(self) -> Callable[[step.Stage], jax.stages.Wrapped]:
        """Function that takes a stage and returns the stage's program that applies the total."""

        def of_stage(stage: step.Stage) -> jax.stages.Wrapped:
            return self._jit(
                self.updating(stage),
                in_shardings=(self.places, self.held, self.replicated, self.replicated),
                out_shardings=(self.places, self.replicated),
                donate_argnums=0,
            )

        return functools.cache(of_stage)

    @functools.cached_property
    def _per_example(self) -> jax.stages.Wrapped:
        return self._jit(
            self.one_by_one,
            in_shardings=(self.places, self.held.grads, self.batch, *[self.replicated] * 2),
            out_shardings=self.replicated,
        )

    def __call__(
        self,
        state: TrainState,
        microbatches: Sequence[Batch],
        rate: float = math.nan,
        per_example: bool = False,
        update: int = 0,
    ) -> tuple[TrainState, Sums]:
        """Makes an update; returns the new state and the metric sums.

        Args:
          state: the train state, whose buffers are donated.
          microbatches: the batch; each microbatch has the shapes of the attribute `microbatch`.
          rate: the learning rate, ignored without `optimizer_at`.
          per_example: whether to measure per-example gradients, if the statistics include them.
          update: number of completed updates, which determines the stage.

        Raises:
          ValueError: the optimizer needs the gradients of two halves of the batch, and the number
            of microbatches is odd.
        """
        devices = mesh_lib.num_batch_shards(self.mesh) if self.is_named else 1
        if self.statistics.to_optimizer and devices == 1 and len(microbatches) % 2:
            raise ValueError(
                f"the number of microbatches, {len(microbatches)}, is odd, but the optimizer needs the "
                "gradients of two halves of the batch; use an even number of microbatches"
            )
        if self._total is None:
            self._total = self.zeros()
        weights, count = self.weights(microbatches), np.int32(len(microbatches))
        for first in range(0, len(microbatches), self.together):
            number = min(self.together, len(microbatches) - first)
            some = [microbatches[first + place] for place in range(number)]
            some += some[-1:] * (self.together - number)  # padding, which no iteration reads
            self._total = self._add(
                state, self._total, some, weights, np.int32(first), np.int32(number), count
            )
        measured = self.unmeasured
        if measured and per_example:
            measured = self._per_example(state, self._total.grads, microbatches[0], weights, count)
        program = self._update(self.stage(update))
        return program(state, self._total, np.float32(rate), measured)

    def stage(self, update: int) -> step.Stage:
        """Returns the stage of the update that follows `update` completed updates."""
        return step.stage_at(self.tx, self.exchange, update)

    def weights(self, microbatches: Sequence[Batch]) -> dict[str, jax.Array]:
        """Returns the example-dependent weights of the full batch, by term of the loss."""
        if self._weigh is None:
            return {}
        each = [self._weigh(batch) for batch in microbatches]
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), each)

    def compile(self, update: int = 0) -> None:
        """Compiles the programs of the update that follows `update` completed updates."""
        for program in self.lowered(update, self.together):
            if program is not None:
                program.compile()
        self._total = self.zeros()

    def lowered(self, update: int = 0, together: int = 1) -> tuple[jax.stages.Lowered | None, ...]:
        """Returns the lowered programs of the update that follows `update` completed updates.

        In this order, the programs compute the weights of a microbatch, add `together` microbatches
        to the total, apply the total, and take per-example gradients. The first is None if no weight
        depends on examples; the last is None if the statistics have no per-example gradients. With
        `together=1`, no loop has an unknown number of iterations.
        """
        weights: Any = jax.eval_shape(self._weigh, self.microbatch) if self._weigh else {}
        total, some = jax.eval_shape(self.zeros), [self.microbatch] * together
        number, rate = (jax.ShapeDtypeStruct((), kind) for kind in (np.int32, np.float32))
        return (
            self._weigh.lower(self.microbatch) if self._weigh else None,
            self._add.lower(self.state, total, some, weights, number, number, number),
            self._update(self.stage(update)).lower(self.state, total, rate, self.unmeasured),
            self._per_example.lower(self.state, total.grads, self.microbatch, weights, number)
            if self.unmeasured
            else None,
        )

    def _added(
        self,
        state: TrainState,
        total: Gradients,
        batches: Sequence[Batch],
        weights: Any,
        first: jax.Array,
        number: jax.Array,
        count: jax.Array,
    ) -> Gradients:
        """Adds the first `number` microbatches to the running total."""
        if len(batches) == 1:
            return self.added(state, total, batches[0], weights, first, count)
        each: list[Callable[[], Batch]] = [functools.partial(dict, batch) for batch in batches]

        def add(place: jax.Array, total: Gradients) -> Gradients:
            batch = lax.switch(place, each)
            return self.added(state, total, batch, weights, first + place, count)

        return lax.fori_loop(0, number, add, total)
