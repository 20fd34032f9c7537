"""Optimizers whose updates have stages; in some stages, devices exchange messages, not gradients.

In such a stage the optimizer receives the gradient of one device and sends a message, for example
its momentum. The messages are summed over devices, see `reducing`. The stage of an update only depends on
the number of completed updates. A trainer therefore asks for the stage first, and compiles one
program per stage.

Without the argument `stage`, as in a plain Optax loop, the count in the state determines the stage.
Then gradients must be summed over all devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.parameters import ParameterMetadata
from lamb_tpu.optim.reducing import Messages, Reducing

MaskedRows = Sequence[tuple[str, tuple[int, int]]]

RELATIVE_FLOOR = 0.1  # see `denominator`
# Remedies if steps are too large for elements with small second moments, see `denominator`.
REMEDY = (
    "a larger config.optimizer.relative_floor or config.optimizer.eps, a mask by "
    "config.optimizer.mask_unseen and config.optimizer.masked_rows"
)

BY_COUNT = "by count"  # the default of `stage`


class Stage(NamedTuple):
    """A stage of an update."""

    name: str  # such as 'warm-up' or 'compressed'
    local: bool = False  # whether gradients are this device's share instead of the sum over devices
    reduces: bool = False  # whether the update sends a message, see `Reducing.message`
    # Whether the exchange's residual is set to zero first, because from this update on another
    # quantity is sent.
    resets: bool = False


FIRST = Stage("first")  # discards the gradient, like DeepSpeed's first step, which creates buffers
WARM_UP = Stage("warm-up")
COMPRESSED = Stage("compressed", local=True, reduces=True)


class Stages(NamedTuple):
    """The stages of an optimizer."""

    all: tuple[Stage, ...]
    # A function from the number of completed updates (an int or traced) to the index in `all`.
    index: Callable[[Any], Any]  # type: ignore[assignment]

    def choose(self, stage: Any, completed: jax.Array, run: Callable[[Stage], Any]) -> Any:
        """Calls `run` with the stage of an update.

        Args:
          stage: a `Stage`; `BY_COUNT` to choose among all stages by `completed`; or None to choose
            among the stages with summed gradients by `completed`.
          completed: the number of completed updates, possibly traced.
          run: a function of a stage, which returns arrays of the same shapes for every stage.
        """
        if isinstance(stage, Stage):
            return run(stage)
        possible = [i for i, one in enumerate(self.all) if stage == BY_COUNT or not one.local]
        if len(possible) == 1:
            return run(self.all[possible[0]])
        if not isinstance(completed, jax.core.Tracer):
            # Outside jit the count is known.
            return run(self.all[int(self.index(completed))])
        branch_of = [possible.index(i) if i in possible else 0 for i in range(len(self.all))]
        branches = [lambda one=self.all[i]: run(one) for i in possible]
        return jax.lax.switch(jnp.asarray(branch_of)[self.index(completed)], branches)


class Staged(Reducing):
    """A transform with stages, see `leafwise.transform`.

    Attributes:
      stages: all possible stages.
      stage: a function from the number of completed updates to the stage of the next update. `at`
        returns the same, but None for a stage with gradients that are summed before the update.
    """

    stages: tuple[Stage, ...]
    stage: Callable[[int], Stage]

    def __new__(
        cls, init: Callable[..., Any], update: Callable[..., Any], message: Messages, stages: Stages
    ) -> "Staged":
        def stage_of(update: int) -> Stage:
            return stages.all[int(stages.index(update))]

        def at(update: int) -> Stage | None:
            return stage_of(update) if stage_of(update).local else None

        made = super().__new__(cls, init, update, message, at)
        made.stages, made.stage = stages.all, stage_of
        return made


def leaves_devices_apart(tx: optax.GradientTransformation) -> bool:
    """Returns whether parameters may differ between devices after an update.

    >>> from lamb_tpu import optim
    >>> leaves_devices_apart(optim.zero_one_adam(0.1, local_step_clipper=4))
    True
    """
    checks.check_transform("tx", tx)
    stages = tx.stages if isinstance(tx, Staged) else ()
    return any(stage.local and not stage.reduces for stage in stages)


def frozen_after(freeze_step: int, discard_first: bool) -> Stages:
    """Returns the stages of an optimizer whose second moments are frozen after a warm-up."""
    stages = (FIRST,) * discard_first + (WARM_UP, COMPRESSED)
    return Stages(stages, lambda c: number(c > 0) * int(discard_first) + number(c >= freeze_step))


def number(flag: Any) -> Any:
    """Converts a bool to an int, and a bool array to int32, so that flags can be added."""
    return flag.astype(np.int32) if hasattr(flag, "astype") else int(flag)


def denominator(
    nu: jax.Array,
    metadata: ParameterMetadata,
    eps: float | jax.Array,
    relative_floor: float | jax.Array,
) -> jax.Array:
    r"""Returns the root of second moments, with a lower bound that depends on the layer, plus `eps`.

    If momentum is sent with one bit per value, the momentum of every element of a leaf has the same
    size, the leaf's root mean square, and only the sign differs. Suppose that the root of an
    element's second moment is a thousandth of that of the other elements. This element would then move a
    thousand times as far as the others, whatever its gradient. Error feedback would correct this later,
    but the loss would already have exploded. With a `relative_floor` of 0.1, no element moves more than
    ten times as far as an element with the layer's mean second moment. Elements below the
    floor, such as rows of rare words, learn more slowly than with Adam. A mask in place of the
    floor would stop these elements for the rest of the run.

    On configs/digits.py with one seed, `onebit_adam` ends with parameters of norm 47, 22 and 21 and
    training losses of 0.0026, 0.0026 and 0.0043 for floors of 0.01, 0.1 and 1, respectively. With a
    mask at the threshold 0.1, the norm is 22 and the loss 0.0026. Adam ends with the norm 19.

    Args:
      nu: the second moments of a leaf.
      metadata: the metadata of the leaf; `layer_axes` define its layers.
      eps: added to the root.
      relative_floor: the bound as a fraction of the root of the layer's mean second moment.
    """
    root = trust_ratio.root(nu)
    if isinstance(relative_floor, jax.Array) or relative_floor > 0:
        layer = trust_ratio.root(trust_ratio.leaf_mean(nu, metadata))
        root = jnp.maximum(root, (relative_floor * layer).astype(root.dtype))
    return root + eps


def check_masked_rows(masked_rows: Any) -> None:
    """Raises ValueError for invalid `masked_rows`, see `onebit_adam.OneBit.masked`."""
    pairs = isinstance(masked_rows, (tuple, list)) and all(
        checks.is_pair(pair)
        and isinstance(pair[0], str)
        and checks.is_pair(pair[1])
        and all(type(row) is int for row in pair[1])
        and 0 <= pair[1][0] < pair[1][1]
        for pair in masked_rows
    )
    if not pairs:
        raise ValueError(
            f"masked_rows={masked_rows!r} must be a list of (regular expression over paths, (first "
            "row, row after the last)), such as (('position_embeddings', (128, 512)),)"
        )
    parameters.check_rules([(pattern, {}) for pattern, _ in masked_rows])
