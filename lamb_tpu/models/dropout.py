"""Dropout with masks that depend on the example, not on the device that holds it."""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lamb_tpu.models import axes as axes_lib

# Masks compare 16 random bits with the rate, because drawing bits is what dropout costs.
_LEVELS = 2**16

# A context variable, because Linen networks take only `(inputs, train)` and would have to pass the
# positions to every layer.
_positions: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(
    "example_positions", default=None
)


@contextlib.contextmanager
def example_positions(positions: jax.Array) -> Iterator[None]:
    """Sets the positions of the rows in the global batch, for `positions_of`.

    It applies while a network is traced inside the `with` block; `positions` may be a tracer.
    Without it the rows count as 0, 1, ... An inner jit, scan or checkpoint of the same function
    object is traced only once and would keep its first positions (or fail). So such a function must
    be created inside the block, as Linen's nn.remat and nn.scan do.

    Args:
      positions: int32 (rows,), counted from 0; each at most once in a batch.

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


def positions_of(rows: int) -> jax.Array:
    """Returns the positions, int32 (rows,), that `example_positions` has set.

    Raises:
      ValueError: there is not one position for each row.
    """
    positions = _positions.get()
    if positions is None:
        return jnp.arange(rows, dtype=jnp.int32)
    if positions.shape != (rows,):
        raise ValueError(
            f"there are {rows} rows and positions of shape {positions.shape}; it takes one "
            "position for each row"
        )
    return positions


def rounded(rate: float) -> float:
    """Rounds a rate to a multiple of 2^-16 below 1."""
    # A rate of 1 would divide by 0.
    return min(round(rate * _LEVELS), _LEVELS - 1) / _LEVELS


def draw_kept(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """Draws the values of an array (rows, ...) that are kept, bool; see `Dropout`.

    Args:
      key: typed random key.
      rate: share of the values that are dropped, a result of `rounded`.
      shape: shape of the array.

    Raises:
      ValueError: there is not one position for each row.
    """
    rows, *row = shape
    positions = positions_of(rows)
    # Under vmap the 'rbg' generators draw all rows from the first key, so only threefry can draw
    # each row by a key of its own.
    if str(jax.random.key_impl(key)) == "threefry2x32":
        bits = jax.vmap(lambda position: _bits_of_row(jax.random.fold_in(key, position), row))(
            positions
        )
    else:
        bits = _bits_of_part(key, positions, row)
    # Of the 2^16 values, rate * 2^16 are below the threshold and dropped.
    return bits >= jnp.uint16(rate * _LEVELS)


def _bits_of_row(key: jax.Array, shape: list[int]) -> jax.Array:
    """Draws 16 bits for each place of a row, two places from each word, to save time."""
    # Halved along the last axis, which no mesh axis splits.
    *outer, last = shape or (1,)
    words = jax.random.bits(key, (*outer, -(-last // 2)), jnp.uint32)
    halves = jnp.concatenate([words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)], -1)
    return halves[..., :last].reshape(shape)


def _bits_of_part(key: jax.Array, positions: jax.Array, shape: list[int]) -> jax.Array:
    """Draws 16 bits for each place of all rows; each device draws those of its rows."""

    def draw(key: jax.Array, positions: jax.Array) -> jax.Array:
        # The first position differs between devices and between microbatches.
        key = jax.random.fold_in(key, positions[0])
        return jax.random.bits(key, (len(positions), *shape), jnp.uint16)

    mesh, axes = jax.sharding.get_abstract_mesh(), axes_lib.of_rows()
    # shard_map needs rows that divide over the axes; the rows of `init` need not.
    if not axes or len(positions) % math.prod(mesh.shape[axis] for axis in axes):
        return draw(key, positions)
    # By default the compiler makes every device draw all rows. With a mere sharding constraint it
    # may split them in another way when the backward pass draws the mask again, which would give
    # another mask.
    rows = PartitionSpec(axes)
    return jax.shard_map(draw, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False)(
        key, positions
    )


class Dropout(nn.Module):
    """Sets a share of the values to 0 and divides the others by 1 - rate.

    The mask is a function of the layer's key (from the key 'dropout' given to `apply` and the path
    of the module), the position of the example in the global batch, and the place within the
    example. So it is the same on one device, under jit over many, inside shard_map and pmap, and in
    microbatches, if `example_positions` gives the positions of the rows.

    This holds for keys of JAX' default, threefry2x32. With 'rbg' and 'unsafe_rbg', which are faster
    on a TPU, a device draws all its rows at once, by the position of the first. The mask then
    depends on the number of rows on a device. It is the same in shard_map and under jit if
    `jax.set_mesh` or `jax.sharding.use_abstract_mesh` gives the mesh; all its axes but those of
    `axes.WITHIN_EXAMPLES` split the rows. Without a mesh every device draws all rows.

    Attributes:
      rate: share of the values that are dropped, in [0, 1); `rounded` to a multiple of 2^-16.
      whole_examples: keep or drop all values of an example together. For the branch of a residual
        block this is stochastic depth.

    References:
      Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014.
      Huang et al., Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """

    rate: float
    whole_examples: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drops values of (batch, ...) if `train` is true; else returns `x`.

        Raises:
          ValueError: `rate` is out of range, or there is not one position for each row.
        """
        if type(self.rate) not in (int, float) or not 0 <= self.rate < 1:
            raise ValueError(f"the rate of dropout must be in [0, 1), not {self.rate!r}")
        rate = rounded(self.rate)
        if not train or rate == 0:
            return x
        shape = x.shape[:1] if self.whole_examples else x.shape
        kept = draw_kept(self.make_rng("dropout"), rate, shape)
        # With `whole_examples` the mask is (batch,) and broadcasts over the example's values.
        kept = jnp.expand_dims(kept, tuple(range(kept.ndim, x.ndim)))
        return jnp.where(kept, x / (1 - rate), 0)
