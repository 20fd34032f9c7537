"""Components of the train state in addition to parameters, model state and optimizer state.

A component defines its initial value, the shardings of its arrays and how an update changes it. The
step and the checkpoints treat all components equally. To add a component, write a class here and add
it to the list that `lamb_tpu.run.build` makes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lamb_tpu.optim.trust_ratio import compute_dtype
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.types import Params, PyTree

# Name of the component that holds the residual of an exchange, see `exchange.residual`.
RESIDUAL = "residual"


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of the parameters, as a component sees it.

    If `finite` is False, the update is skipped, and the component's method `skipped` returns the
    component's new value.
    """

    step: jax.Array  # number of updates completed before this update, int32 scalar
    params: Params  # the new parameters, sharded like the optimizer's state
    model_state: PyTree  # the new model state
    # Whether the gradient was finite, a boolean scalar; None if this was not checked.
    finite: jax.Array | None
    # The new value of each component's field, (rows, ...), by the component's name.
    rows: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    residual: PyTree = ()  # the new residual of the exchange; () without a residual


class StateComponent(Protocol):
    """A component of the train state."""

    @property
    def name(self) -> str:
        """Name of the component, in `TrainState.parts` and in checkpoints."""

    def init(self, params: Params, model_state: PyTree) -> Any:
        """Returns the component before the first update; None if the run does not have it."""

    def shardings(self, value: Any, layout: Layout) -> Any:
        """Returns a sharding for each array of the component."""

    def updated(self, value: Any, update: Update) -> Any:
        """Returns the component after an update."""

    def skipped(self, before: Any, after: Any) -> Any:
        """Returns the component after a skipped update; by default its value before the update.

        The default also restores counts, because the count of an average must match the average.
        `after` is what `updated` returned; its arrays may hold NaN.
        """
        return before

    def field(self, value: Any) -> jax.Array | None:
        """Returns the array (rows, ...) of a component that has a value for each row of a batch.

        The default, None, is for a component without such values. The step adds the array to the
        batch under the component's name, so that it is split over devices and microbatches like any
        other field. The task returns the new array in the model state under the same name, and
        `updated` gets it in `Update.rows`.
        """
        return None

    def saved(self, value: Any, shapes: Any) -> Any:
        """Returns shapes and shardings with which to read the component from a checkpoint.

        Args:
          value: the shapes and shardings of this run, which are the default result.
          shapes: the shapes in the checkpoint, as dicts and lists of `jax.ShapeDtypeStruct`s.
        """
        return value

    def resumed(self, value: Any) -> Any:
        """Returns a checkpoint's component as this run's devices need it; by default unchanged."""
        return value

    def moved(self, value: Any) -> str:
        """Returns a message that says what `resumed` changes; '' if it changes nothing."""
        return ""

    def copied(self, value: Any) -> Any:
        """Returns the replicated arrays, by default none; a run checks that devices have equal copies."""
        return ()


@dataclasses.dataclass(frozen=True)
class Averages(StateComponent):
    """Moving averages of parameters and model state, e <- d_t e + (1 - d_t) x.

    Here x is a parameter or an entry of the model state, e its average, and
    d_t = min(decay, (1 + t) / (10 + t)) after t updates, as in TensorFlow. TensorFlow's EfficientNet
    recipes have decay = 0.9999. The averages are float32 or wider.

    Attributes:
      decay: the largest d_t; 0: no averages.
    """

    decay: float = 0.0
    name: str = "ema"

    def init(self, params: Params, model_state: PyTree) -> Any:
        return jax.tree.map(_widened, (params, model_state)) if self.decay > 0 else None

    def shardings(self, value: Any, layout: Layout) -> Any:
        if value is None:
            return None
        whole = mesh_lib.replicated(layout.mesh)
        # Averages of parameters are sharded like the moments, which ZeRO-1 splits; averages of model
        # state are replicated.
        return layout.moments, jax.tree.map(lambda _: whole, value[1])

    def updated(self, value: Any, update: Update) -> Any:
        if value is None:
            return None
        # The decay grows from d_0 = 0.1, so that early averages forget the initial weights.
        step = update.step.astype(jnp.result_type(float))
        decay = jnp.minimum(self.decay, (1.0 + step) / (10.0 + step))

        def moved(average: jax.Array, new: jax.Array) -> jax.Array:
            # Integers, such as counts, are not averaged.
            if not jnp.issubdtype(new.dtype, jnp.floating):
                return new
            rest = (1 - decay).astype(average.dtype)
            return average + rest * (new.astype(average.dtype) - average)

        return jax.tree.map(moved, value, (update.params, update.model_state))


@dataclasses.dataclass(frozen=True)
class Skipped(StateComponent):
    """Number of updates skipped because their gradient was not finite, int32 scalar."""

    name: str = "skipped"

    def init(self, params: Params, model_state: PyTree) -> jax.Array:
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
class Carry(StateComponent):
    """State of a recurrent network, which continues in the same row of the next batch.

    The state is zero at first, and the task sets a row to zero if a new stream of data starts there.
    A skipped update restores the state, so that the next window of the stream continues from the
    state before the skipped window.

    The arrays are `value`, float32 (rows, *shape), and `example`, int32 (rows,), which has for each
    row the index of its example in the batch. With several microbatches the order of the rows
    depends on the number of devices, see `rows.microbatch_order`, so a run that resumes on a
    different number of devices first reorders the rows. No two devices hold the same row, so there
    are no copies to compare.
    """

    shape: tuple[int, ...]  # shape of the state of one row
    rows: int  # number of rows of a batch
    steps: int  # number of microbatches
    mesh: Mesh
    name: str = "carry"

    def _divides(self) -> bool:
        # This can be False only on the mesh of an evaluation, which does not use the carry; on a
        # run's own mesh the training batch splits evenly.
        return self.rows % (mesh_lib.num_batch_shards(self.mesh) * self.steps) == 0

    def _examples(self) -> jax.Array:
        if not self._divides():
            return jnp.arange(self.rows, dtype=jnp.int32)
        shards = mesh_lib.num_batch_shards(self.mesh)
        return rows_lib.positions(self.rows, shards, self.steps)

    def init(self, params: Params, model_state: PyTree) -> dict[str, jax.Array]:
        value = jnp.zeros((self.rows, *self.shape), jnp.float32)
        return {"value": value, "example": self._examples()}

    def shardings(self, value: Any, layout: Layout) -> Any:
        sharding = mesh_lib.batch_sharding if self._divides() else mesh_lib.replicated
        return jax.tree.map(lambda _: sharding(layout.mesh), value)

    def updated(self, value: dict[str, jax.Array], update: Update) -> dict[str, jax.Array]:
        return {**value, "value": update.rows[self.name]}

    def field(self, value: dict[str, jax.Array]) -> jax.Array:
        return value["value"]

    def resumed(self, value: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def moved(value: dict[str, jax.Array]) -> dict[str, jax.Array]:
            row_of = jnp.argsort(value["example"])  # row of each example in the checkpoint
            return jax.tree.map(lambda array: array[row_of[self._examples()]], value)

        return jax.jit(moved, out_shardings=jax.tree.map(lambda x: x.sharding, value))(value)


def _widened(leaf: jax.Array) -> jax.Array:
    # With a decay of 0.9999, the change of a bfloat16 average would always be rounded away.
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.astype(compute_dtype(leaf))
