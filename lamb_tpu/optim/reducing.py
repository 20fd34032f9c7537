"""Optimizers that send a message in place of the gradient, for example compressed momentum."""

from collections.abc import Callable, Hashable
from typing import Any

import optax

# A function from the sum of the messages of all devices to `(updates, state)`.
Apply = Callable[[Any], tuple[optax.Updates, Any]]
# The first phase of an update that sends a message, see `Reducing`.
Messages = Callable[..., tuple[Any, Apply]]


class Reducing(optax.GradientTransformationExtraArgs):
    """A transformation that can send a message in place of the gradient.

    The stage of an update selects its form:

    - Stage None, the plain stage: `update(grads, state, params, *, stage=None, **extra)` receives
      the sum of gradients over devices in float32, like any other optimizer.
    - In any other stage, the update has two phases.
      `message(grads, state, params, *, stage, num_devices)` receives this device's share of the
      gradient, and the state and parameters, which are the same on each device. Like `jax.vjp`, it
      returns a value and a function. The value is this device's message, a tree with the structure
      and shapes of the gradient. The caller sums the messages of all `num_devices` devices. The
      function, `apply(sums)`, returns `(updates, state)`, the same on each device. If the stage has
      an attribute `resets` that is True, the exchange first discards its residual.

    >>> import jax, jax.numpy as jnp
    >>> def message(grads, state, params, *, stage, num_devices):
    ...     momentum = jax.tree.map(lambda m, g: 0.9 * m / num_devices + g, state, grads)
    ...     return momentum, lambda sums: (jax.tree.map(lambda m: -0.1 * m, sums), sums)
    >>> momentum, apply = message([jnp.ones(2)], [jnp.zeros(2)], None, stage='sent', num_devices=2)
    >>> updates, state = apply([2 * momentum[0]])  # both devices sent the same message
    >>> updates[0].tolist()
    [-0.20000000298023224, -0.20000000298023224]

    Args:
      init, update: the functions of the transformation, see
        `optax.GradientTransformationExtraArgs`.
      message: the first phase of updates that send a message.
      at: a function from the number of completed updates to the stage of the next update; None is
        the plain stage. A stage must be hashable. The trainer compiles one program per stage.
    """

    message: Messages
    at: Callable[[int], Hashable]

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        message: Messages,
        at: Callable[[int], Hashable],
    ) -> "Reducing":
        made = super().__new__(cls, init, update)
        made.message, made.at = message, at
        return made


def stage_of(tx: optax.GradientTransformation, update: int) -> Hashable:
    """Returns the stage of an update; None if the optimizer is not a `Reducing`."""
    return tx.at(update) if isinstance(tx, Reducing) else None
