"""An exchange and an optimizer for tests; the exchange has all types of residuals and two stages."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.parallel.exchange import Exchange, Residual

NAME = "tests.parallel.exchange.spread:Spread"


@dataclasses.dataclass(frozen=True)
class Spread(Exchange):
    """Sums gradients; after `start` updates, each device withholds an amount until the next update.

    The amounts sum to zero over devices. So the sums are right only if each device gets its residual
    back, not another device's. In the residual, `split` accumulates the sums in chunks, and `whole`
    counts the updates and has the total of all sums.
    """

    axes: tuple[str, ...]
    num_devices: int
    start: int = 2
    late: bool = False

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"start={self.start} must be at least 0")

    def at(self, update: int) -> "Spread":
        return dataclasses.replace(self, late=update >= self.start)

    def init(self, params: Any) -> Residual:
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        return Residual(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params),
            jnp.zeros(-(-size // self.num_devices), jnp.float32),
            {"count": jnp.zeros((), jnp.int32), "total": jnp.zeros((), jnp.float32)},
        )

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        count, index = residual.whole["count"], lax.axis_index(self.axes)
        kept, sent = residual.device, grads
        if self.late:
            side = index - (self.num_devices - 1) / 2
            back = jax.tree.map(lambda g: jnp.full(g.shape, side / 256, jnp.float32), grads)
            sent = jax.tree.map(lambda g, e, b: g + e - b, grads, kept, back)
            kept = back
        sums = lax.psum(sent, self.axes)
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(sums)])
        length = residual.split.shape[0]
        flat = jnp.pad(flat, (0, length * self.num_devices - flat.size))
        mine = lax.dynamic_slice_in_dim(flat, index * length, length)
        whole = {"count": count + 1, "total": residual.whole["total"] + jnp.sum(flat)}
        return sums, Residual(kept, residual.split + mine, whole)


def momentum(
    learning_rate: Any, warmup: int = 2, decay: float = 0.9, axis_name: Any = None
) -> Reducing:
    """Returns SGD with momentum that sends gradients in `warmup` updates, and then sends its momentum."""
    del axis_name  # the update needs no sums over shards

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return moved(jax.tree.map(lambda m, g: decay * m + g, state[1], grads), state)

    def message(
        grads: Any, state: Any, params: Any, *, stage: Any, num_devices: int
    ) -> tuple[Any, Any]:
        share = jax.tree.map(lambda m, g: decay * m / num_devices + g, state[1], grads)
        return share, lambda trace: moved(trace, state)

    def moved(trace: Any, state: Any) -> tuple[Any, Any]:
        count, _ = state
        rate = learning_rate(count)
        return jax.tree.map(lambda m: -rate * m, trace), (count + 1, trace)

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)

    return Reducing(init, update, message, lambda count: "momentum" if count >= warmup else None)
