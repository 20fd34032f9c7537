"""Optimizers that sum over devices by themselves, such as those that compress momentum."""

from collections.abc import Callable, Hashable
from typing import Any

import optax


class Reducing(optax.GradientTransformationExtraArgs):
    """A transformation that, after its warm-up, sends something else than the gradient.

    Its `update(grads, state, params, *, reduce=None, stage=None, num_devices=1, **extra)` gets
    the values of its stage:

    - `stage` None, the plain stage: `grads` are sums over devices in float32, `reduce` is None.
    - otherwise `grads` are this device's share, whose sum over devices is the gradient. It calls
      `reduce(tree)` exactly once, with a tree of the gradient's structure and shapes, and gets the
      sums over devices of the trees, which are the same on each. `num_devices` is their number, for
      a mean. The state must come out the same on each device. Where the stage has an attribute
      `resets` that is True, the exchange first drops the errors of earlier sums.

    Args:
      init, update: of the transformation.
      at: returns the stage of the update after a number of completed ones, hashable and the same
        for all updates that one program can make; None is the plain stage.
    """

    at: Callable[[int], Hashable]

    def __new__(
        cls, init: Callable[..., Any], update: Callable[..., Any], at: Callable[[int], Hashable]
    ) -> "Reducing":
        made = super().__new__(cls, init, update)
        made.at = at
        return made


def stage_of(tx: optax.GradientTransformation, update: int) -> Hashable:
    """Returns the stage of an update; None for an optimizer that leaves the sums to the step."""
    return tx.at(update) if isinstance(tx, Reducing) else None
