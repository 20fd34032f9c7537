"""Parts of the train state beside parameters, model state and optimizer state.

A part says how it starts, where its arrays live and how an update changes it. The step and the
checkpoints treat all parts alike, so that a new one is a class here and an entry in the list that
`lamb_tpu.run.build` makes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lamb_tpu.optim.trust_ratio import compute_dtype
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.layout import Layout

# Name of the part that an exchange of gradients keeps, see `exchange.keeping`.
RESIDUAL = "residual"


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of the parameters, as a part sees it.

    Attributes:
      step: number of updates completed before it, int32 scalar.
      params: the new parameters, placed as the optimizer's state.
      model_state: the new model state.
      finite: whether the gradient was finite, a boolean scalar; None where it was not checked. If
        it is False, the update is skipped, and `skipped` decides what the part becomes.
      rows: the new value of each part's field, (rows, ...), by the part's name.
      residual: what the exchange of gradients keeps; () without.
    """

    step: jax.Array
    params: Any
    model_state: Any
    finite: jax.Array | None
    rows: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    residual: Any = ()


class StatePart(Protocol):
    """A part of the train state.

    Attributes:
      name: attribute of the state, and name in checkpoints.
    """

    @property
    def name(self) -> str:
        """Name of the attribute."""

    def init(self, params: Any, model_state: Any) -> Any:
        """Returns the part before the first update; None if the run has no such part."""

    def shardings(self, value: Any, layout: Layout) -> Any:
        """Returns a sharding for each array of the part."""

    def updated(self, value: Any, update: Update) -> Any:
        """Returns the part after an update."""

    def skipped(self, before: Any, after: Any) -> Any:
        """Returns the part after a skipped update; by default the part before it.

        Counts go back too: a count of what an average holds must not pass the average.

        Args:
          before: the part before the update.
          after: what `updated` returned; its arrays may hold NaN.
        """
        return before

    def field(self, value: Any) -> jax.Array | None:
        """Returns the part's array (rows, ...), for a part that lives with the rows of a batch.

        The step adds it to the batch, under the part's name, so that devices and microbatches cut
        it as any other field. The task returns its new value in the model's state, under that name
        too, and `updated` gets it in `Update.rows`. None, the default, for other parts.
        """
        return None

    def saved(self, value: Any, shapes: Any) -> Any:
        """Returns shapes and shardings in which to read the part of a checkpoint.

        Args:
          value: those of this run, the default.
          shapes: those of the checkpoint, as dicts and lists of `jax.ShapeDtypeStruct`s.
        """
        return value

    def resumed(self, value: Any) -> Any:
        """Returns the part of a checkpoint as this run's devices need it; by default as it is."""
        return value

    def moved(self, value: Any) -> str:
        """Returns a line about what `resumed` changes in the part of a checkpoint; '': nothing."""
        return ""

    def copied(self, value: Any) -> Any:
        """Returns the arrays whose copies on several devices are compared; none by default."""
        return ()


@dataclasses.dataclass(frozen=True)
class Averages(StatePart):
    """Moving averages of parameters and model state, e <- d_t e + (1 - d_t) x.

    d_t = min(decay, (1 + t) / (10 + t)) after t updates, as in TensorFlow, whose EfficientNet
    recipes have 0.9999. The averages are kept in float32 at least.

    Attributes:
      decay: the largest d_t; 0 keeps no averages.
    """

    decay: float = 0.0
    name: str = "ema"

    def init(self, params: Any, model_state: Any) -> Any:
        return jax.tree.map(_widened, (params, model_state)) if self.decay > 0 else None

    def shardings(self, value: Any, layout: Layout) -> Any:
        if value is None:
            return None
        whole = mesh_lib.replicated(layout.mesh)
        # As (parameters, model state): under ZeRO-1 the first are split as the moments are.
        return layout.moments, jax.tree.map(lambda _: whole, value[1])

    def updated(self, value: Any, update: Update) -> Any:
        if value is None:
            return None
        step = update.step
        # The ramp lets early averages forget the initial weights: d_0 is 0.1.
        step = step.astype(jnp.result_type(float))
        decay = jnp.minimum(self.decay, (1.0 + step) / (10.0 + step))

        def moved(average: jax.Array, new: jax.Array) -> jax.Array:
            # An integer, such as a count, has no average.
            if not jnp.issubdtype(new.dtype, jnp.floating):
                return new
            rest = (1 - decay).astype(average.dtype)
            return average + rest * (new.astype(average.dtype) - average)

        return jax.tree.map(moved, value, (update.params, update.model_state))


@dataclasses.dataclass(frozen=True)
class Skipped(StatePart):
    """Number of updates skipped because their gradient was not finite, int32 scalar."""

    name: str = "skipped"

    def init(self, params: Any, model_state: Any) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def shardings(self, value: Any, layout: Layout) -> Any:
        return mesh_lib.replicated(layout.mesh)

    def updated(self, value: jax.Array, update: Update) -> jax.Array:
        if update.finite is None:
            return value
        return value + 1 - update.finite.astype(jnp.int32)

    def skipped(self, before: jax.Array, after: jax.Array) -> jax.Array:
        return after


@dataclasses.dataclass(frozen=True)
class Carry(StatePart):
    """State of a recurrent network, which goes on in the same row of the next batch.

    It is zero at first. A task sets it to zero where a row's stream starts. A skipped update puts
    it back, so that the next window goes on from the state before the one that was skipped.

    Its arrays are `value`, float32 (rows, *shape), and `example`, int32 (rows,): which example of a
    batch each row holds. With several microbatches that depends on the number of devices, see
    `mesh.microbatch_order`, so a run that is resumed on others first moves the rows. No two devices
    hold the same row, so there are no copies to compare.

    Attributes:
      shape: shape of a row's carry.
      rows: number of rows of a batch.
      steps: number of microbatches.
      mesh: the mesh over all devices.
    """

    shape: tuple[int, ...]
    rows: int
    steps: int
    mesh: Mesh
    name: str = "carry"

    def _divides(self) -> bool:
        # Only an evaluation may have a mesh over which a training batch does not divide. It keeps
        # the carry without using it.
        return self.rows % (mesh_lib.num_batch_shards(self.mesh) * self.steps) == 0

    def _examples(self) -> jax.Array:
        if not self._divides():
            return jnp.arange(self.rows, dtype=jnp.int32)
        shards = mesh_lib.num_batch_shards(self.mesh)
        return jnp.asarray(mesh_lib.microbatch_order(self.rows, shards, self.steps), jnp.int32)

    def init(self, params: Any, model_state: Any) -> dict[str, jax.Array]:
        value = jnp.zeros((self.rows, *self.shape), jnp.float32)
        return {"value": value, "example": self._examples()}

    def shardings(self, value: Any, layout: Layout) -> Any:
        place = mesh_lib.batch_sharding if self._divides() else mesh_lib.replicated
        return jax.tree.map(lambda _: place(layout.mesh), value)

    def updated(self, value: dict[str, jax.Array], update: Update) -> dict[str, jax.Array]:
        return {**value, "value": update.rows[self.name]}

    def field(self, value: dict[str, jax.Array]) -> jax.Array:
        return value["value"]

    def resumed(self, value: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def moved(value: dict[str, jax.Array]) -> dict[str, jax.Array]:
            row_of = jnp.argsort(value["example"])  # of each example, in the checkpoint
            return jax.tree.map(lambda array: array[row_of[self._examples()]], value)

        return jax.jit(moved, out_shardings=jax.tree.map(lambda x: x.sharding, value))(value)


def _widened(leaf: jax.Array) -> jax.Array:
    # An average of bfloat16 weights that is kept in bfloat16 never moves at 0.9999.
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.astype(compute_dtype(leaf))
