"""Dropout with masks that depend on the example, not on the device that computes it."""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lamb_tpu.errors import ArgumentError
from lamb_tpu.kernels import axes as axes_lib

# Masks compare 16 random bits with the rate, because drawing bits is the main cost of dropout.
_LEVELS = 2**16

# A context variable, because Linen networks only take `(inputs, train)`; as an argument, the
# positions would have to be passed to every layer.
_positions: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(
    "example_positions", default=None
)


@contextlib.contextmanager
def example_positions(positions: jax.Array) -> Iterator[None]:
    """Sets the rows' positions in the global batch for networks that are traced in the `with` block.

    By default, the positions are 0, 1, ... JAX traces an inner jit, scan or checkpoint only once for
    the same function object, so a function object that was traced before would use the earlier
    positions (or fail). Therefore create the function inside the block, as Linen's nn.remat and
    nn.scan do.

    Args:
      positions: int32 (rows,), possibly a tracer; counted from 0, and different for all rows of a
        batch.

    >>> x, key = jnp.ones((4, 8)), {"dropout": jax.random.key(0)}
    >>> full = Dropout(0.5).apply({}, x, train=True, rngs=key)
    >>> with example_positions(jnp.array([2, 3])):
    ...     half = Dropout(0.5).apply({}, x[2:], train=True, rngs=key)
    >>> bool((half == full[2:]).all())
    True
    """
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def positions_of(rows: int) -> jax.Array:
    """Returns the positions set by `example_positions`, int32 (rows,); by default 0, 1, ...

    Raises:
      ValueError: the number of positions differs from the number of rows.
    """
    positions = _positions.get()
    if positions is None:
        return jnp.arange(rows, dtype=jnp.int32)
    if positions.shape != (rows,):
        raise ValueError(
            f"positions has shape {positions.shape}, but must have shape ({rows},): one per row"
        )
    return positions


def rounded(rate: float) -> float:
    """Rounds a dropout rate to a multiple of 2^-16 that is less than 1."""
    # A rate of 1 would cause a division by 0.
    return min(round(rate * _LEVELS), _LEVELS - 1) / _LEVELS


def draw_kept(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """Draws a dropout mask, True for values that are not dropped; see `Dropout`.

    Args:
      key: typed random key.
      rate: fraction of dropped values, a result of `rounded`.
      shape: shape of the mask, (rows, ...).

    Raises:
      ValueError: the number of positions set by `example_positions` differs from the number of rows.
    """
    rows, *row = shape
    positions = positions_of(rows)
    # Under vmap the 'rbg' generators draw all rows from the first key, so only threefry can use a
    # separate key per row.
    if str(jax.random.key_impl(key)) == "threefry2x32":
        bits = jax.vmap(lambda position: _bits_of_row(jax.random.fold_in(key, position), row))(
            positions
        )
    else:
        bits = _bits_of_shard(key, positions, row)
    # The fraction `rate` of the 2^16 possible values is below the threshold; these are dropped.
    return bits >= jnp.uint16(rate * _LEVELS)


def _bits_of_row(key: jax.Array, shape: list[int]) -> jax.Array:
    """Draws 16 bits for each value of a row; to save time, each 32-bit word serves two values."""
    # Halve the last axis, which no mesh axis splits.
    *outer, last = shape or (1,)
    words = jax.random.bits(key, (*outer, -(-last // 2)), jnp.uint32)
    halves = jnp.concatenate([words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)], -1)
    return halves[..., :last].reshape(shape)


def _bits_of_shard(key: jax.Array, positions: jax.Array, shape: list[int]) -> jax.Array:
    """Draws 16 bits for each value of all rows; each device draws the bits of its rows."""

    def draw(key: jax.Array, positions: jax.Array) -> jax.Array:
        # The first position differs between devices and between microbatches.
        key = jax.random.fold_in(key, positions[0])
        return jax.random.bits(key, (len(positions), *shape), jnp.uint16)

    mesh, axes = jax.sharding.get_abstract_mesh(), axes_lib.of_rows()
    # shard_map requires that the axes divide the number of rows, which they may not in `init`.
    if not axes or len(positions) % math.prod(mesh.shape[axis] for axis in axes):
        return draw(key, positions)
    # By default the compiler makes every device draw all rows. With only a sharding constraint it
    # may split the rows differently when the backward pass draws the mask again, which would give a
    # different mask.
    rows = PartitionSpec(axes)
    return jax.shard_map(draw, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False)(
        key, positions
    )


class Dropout(nn.Module):
    """Sets a random fraction `rate` of the values to 0, and divides the others by 1 - rate.

    The mask is a function of the layer's key (derived from the key 'dropout' given to `apply` and
    the module's path), the position of the example in the global batch, and the index within the
    example. If `example_positions` sets the positions of the rows, the mask is therefore the same
    on one device, under jit over many devices, inside shard_map and pmap, and in microbatches.

    This holds for JAX's default keys, threefry2x32. With 'rbg' and 'unsafe_rbg', which are faster
    on a TPU, a device draws the masks of all its rows at once, from the position of its first row,
    so the masks depend on the number of rows per device. If `jax.set_mesh` or
    `jax.sharding.use_abstract_mesh` sets the mesh, the masks are the same in shard_map and under jit;
    all axes of the mesh except `axes.WITHIN_EXAMPLES` then split the rows. Under jit without a mesh,
    every device draws the masks of all rows.

    Attributes:
      rate: fraction of dropped values, in [0, 1); `rounded` to a multiple of 2^-16.
      whole_examples: drop either all values of an example or none. Applied to the branch of a
        residual block, this is stochastic depth.

    References:
      Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014.
      Huang et al., Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """

    rate: float
    whole_examples: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drops values of (batch, ...) if `train` is true; otherwise returns `x`.

        Raises:
          ValueError: `rate` is out of range, or `example_positions` does not match the rows.
        """
        if type(self.rate) not in (int, float) or not 0 <= self.rate < 1:
            remedy = "use at least 0 and less than 1"
            raise ArgumentError("dropout_rate", self.rate, "is out of range", remedy)
        rate = rounded(self.rate)
        if not train or rate == 0:
            return x
        shape = x.shape[:1] if self.whole_examples else x.shape
        mask = draw_kept(self.make_rng("dropout"), rate, shape)
        # With `whole_examples` the mask is (batch,) and broadcasts over the example's values.
        mask = jnp.expand_dims(mask, tuple(range(mask.ndim, x.ndim)))
        return jnp.where(mask, x / (1 - rate), 0)
