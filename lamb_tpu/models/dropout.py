"""Dropout whose mask belongs to the example, not to the device that holds it."""

import contextlib
import contextvars
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp

_positions: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(
    "example_positions", default=None
)


@contextlib.contextmanager
def example_positions(positions: jax.Array) -> Iterator[None]:
    """Tells `Dropout` which examples of the global batch the rows at hand are.

    In force while a network is traced inside the `with` block; there `positions` may be a tracer.
    Without it the rows count as 0, 1, ... An inner jit, scan or checkpoint of one and the same
    function object is traced once and would keep the positions of that time (or fail): make such a
    function inside the block, as Linen's nn.remat and nn.scan do.

    Args:
      positions: int32 (rows,), counted from 0; within one batch each at most once.

    >>> x, key = jnp.ones((4, 8)), {"dropout": jax.random.key(0)}
    >>> whole = Dropout(0.5).apply({}, x, train=True, rngs=key)
    >>> with example_positions(jnp.array([2, 3])):
    ...     half = Dropout(0.5).apply({}, x[2:], train=True, rngs=key)
    >>> bool((half == whole[2:]).all())
    True
    """
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


class Dropout(nn.Module):
    """Sets a share of the values to 0 and divides the others by what is left, 1 - rate.

    Which ones is a function of the key of the layer (Linen's: the key 'dropout' given to `apply`
    and the path of the module), the position of the example in the global batch, and the place
    within the example. So the mask is the same on one device, under jit over many, inside shard_map
    and pmap, and in microbatches, once `example_positions` tells which rows a part has.

    That holds for keys whose bits are a function of the key and the place alone, as JAX's default,
    threefry2x32. Of 'rbg' and 'unsafe_rbg', faster on a TPU, JAX draws all rows from the key of the
    first: then the mask depends on the first row of a part and on the number of its rows. Under jit
    it is still the same over any number of devices; inside shard_map, pmap and microbatches it is
    another mask, as random, different from part to part.

    Attributes:
      rate: share of the values that are dropped, in [0, 1); known to 2^-32.

    References:
      Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drops values of (batch, ...) where `train` is true; else returns `x`.

        Raises:
          ValueError: `rate` is out of its range, or there is not one position for each row.
        """
        if type(self.rate) not in (int, float) or not 0 <= self.rate < 1:
            raise ValueError(f"the rate of dropout must be in [0, 1), not {self.rate!r}")
        if not train or self.rate == 0:
            return x
        positions = _positions.get()
        if positions is None:
            positions = jnp.arange(len(x), dtype=jnp.int32)
        if positions.shape != x.shape[:1]:
            raise ValueError(
                f"Dropout got {len(x)} rows and positions of shape {positions.shape}; it takes one "
                "position for each row"
            )
        key = self.make_rng("dropout")

        def bits_of_row(position: jax.Array) -> jax.Array:
            return jax.random.bits(jax.random.fold_in(key, position), x.shape[1:], jnp.uint32)

        dropped = jax.vmap(bits_of_row)(positions) < jnp.uint32(int(self.rate * 2**32))
        return jnp.where(dropped, 0, x / (1 - self.rate))
