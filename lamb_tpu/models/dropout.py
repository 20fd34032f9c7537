"""Dropout whose mask belongs to the example, not to the device that holds it."""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

# Mesh axes that split what lies within an example. The others split the batch.
WITHIN_EXAMPLES = ("model", "sequence")
_LEVELS = 2**16

_positions: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(
    "example_positions", default=None
)


@contextlib.contextmanager
def example_positions(positions: jax.Array) -> Iterator[None]:
    """Tells which examples of the global batch the rows at hand are, see `positions_of`.

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


def positions_of(rows: int) -> jax.Array:
    """The positions, int32 (rows,), that `example_positions` tells of the rows at hand.

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
    """The rate that is drawn where `rate` is asked for: a multiple of 2^-16 below 1."""
    return min(round(rate * _LEVELS), _LEVELS - 1) / _LEVELS


def draw_kept(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """Which values of an array (rows, ...) stay, bool; see `Dropout` for what decides it.

    Args:
      key: random, typed.
      rate: share of the values that do not stay, as `rounded` gives it.
      shape: of the array.

    Raises:
      ValueError: there is not one position for each row.
    """
    rows, *row = shape
    positions = positions_of(rows)
    if str(jax.random.key_impl(key)) == "threefry2x32":
        bits = jax.vmap(lambda position: _bits_of_row(jax.random.fold_in(key, position), row))(
            positions
        )
    else:
        bits = _bits_of_part(key, positions, row)
    return bits >= jnp.uint16(rate * _LEVELS)


def _bits_of_row(key: jax.Array, shape: list[int]) -> jax.Array:
    """16 bits for each place of a row, from half as many words: they are what takes the time."""
    # The last axis is the one that no mesh axis splits.
    *outer, last = shape or (1,)
    words = jax.random.bits(key, (*outer, -(-last // 2)), jnp.uint32)
    halves = jnp.concatenate([words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)], -1)
    return halves[..., :last].reshape(shape)


def _bits_of_part(key: jax.Array, positions: jax.Array, shape: list[int]) -> jax.Array:
    """16 bits for each place of all rows, drawn by each device for its rows."""

    def draw(key: jax.Array, positions: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, positions[0])
        return jax.random.bits(key, (len(positions), *shape), jnp.uint16)

    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and axis not in WITHIN_EXAMPLES
    )
    if not axes or len(positions) % math.prod(mesh.shape[axis] for axis in axes):
        return draw(key, positions)
    # Left to itself the compiler has every device draw the rows of all. Told not to, it may cut
    # them otherwise when a backward pass draws the mask again, and then that is another mask.
    rows = PartitionSpec(axes)
    return jax.shard_map(draw, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False)(
        key, positions
    )


class Dropout(nn.Module):
    """Sets a share of the values to 0 and divides the others by what is left, 1 - rate.

    Which ones is a function of the key of the layer (Linen's: the key 'dropout' given to `apply`
    and the path of the module), the position of the example in the global batch, and the place
    within the example. So the mask is the same on one device, under jit over many, inside shard_map
    and pmap, and in microbatches, once `example_positions` tells which rows a part has.

    That holds for keys of JAX's default, threefry2x32. Of 'rbg' and 'unsafe_rbg', faster on a TPU,
    a device draws all its rows at once, by the position of the first: then the mask depends on how
    many rows lie together. It is the same in shard_map as under jit where `jax.set_mesh`, or
    `jax.sharding.use_abstract_mesh`, tells the mesh, whose axes but `WITHIN_EXAMPLES` split the
    rows; without a mesh every device draws the rows of all.

    Attributes:
      rate: share of the values that are dropped, in [0, 1); `rounded` to a multiple of 2^-16.
      whole_examples: an example's values stay or are dropped together. For the branch of a residual
        block that is stochastic depth.

    References:
      Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014.
      Huang et al., Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """

    rate: float
    whole_examples: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drops values of (batch, ...) where `train` is true; else returns `x`.

        Raises:
          ValueError: `rate` is out of its range, or there is not one position for each row.
        """
        if type(self.rate) not in (int, float) or not 0 <= self.rate < 1:
            raise ValueError(f"the rate of dropout must be in [0, 1), not {self.rate!r}")
        rate = rounded(self.rate)
        if not train or rate == 0:
            return x
        shape = x.shape[:1] if self.whole_examples else x.shape
        kept = draw_kept(self.make_rng("dropout"), rate, shape)
        kept = jnp.expand_dims(kept, tuple(range(kept.ndim, x.ndim)))
        return jnp.where(kept, x / (1 - rate), 0)
