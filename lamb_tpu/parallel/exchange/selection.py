"""The largest values of a vector and the places where a mask is set, without a sort.

A sort of a whole gradient takes a hundred times as long as reading it, and a scatter of every value
serialises on a TPU. Here a threshold is found by counting, and places by counts of set bits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

_WORD = 32  # bits of a mask that are counted together
# A word has every 128th entry and not 32 neighbours: a TPU's registers are 128 wide, to which it
# would pad an axis of 32, so that a mask of 100 MB would need 2 GB.
_LANES = 128


def kth_largest(values: jax.Array, k: int | jax.Array) -> jax.Array:
    """Returns the k-th largest of non-negative values, exactly.

    The bits of non-negative floating-point numbers are ordered as the numbers are. So two bits of
    the result, from the highest, take one pass that counts the values that are at least as large as
    each candidate. NaN counts as the largest value.

    >>> float(kth_largest(jnp.array([3.0, 1.0, 2.0, 2.0]), 2))
    2.0

    Args:
      values: a vector of float32 or float64.
      k: from 1 to the length of the vector.
    """
    width = 8 * values.dtype.itemsize
    integer = jnp.uint64 if width == 64 else jnp.uint32
    bits = lax.bitcast_convert_type(values, integer)

    def settle(step: jax.Array, found: jax.Array) -> jax.Array:
        shift = (width - 2 * (step + 1)).astype(integer)
        counts = numbers([bits >= (found | (integer(pair) << shift)) for pair in (1, 2, 3)])
        return found | (sum((count >= k).astype(integer) for count in counts) << shift)

    found = lax.fori_loop(0, width // 2, settle, jnp.zeros((), integer))
    return lax.bitcast_convert_type(found, values.dtype)


def numbers(masks: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the number of set entries of each of several masks of one length, int32.

    One reduction of all of them: on a CPU several times as fast as a sum of each.
    """
    return lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [jnp.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        (0,),
    )


def places(mask: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns places where a mask is set: for each rank another one, ascending up to 128 entries.

    >>> places(jnp.array([False, True, False, True]), jnp.arange(3)).tolist()
    [1, 3, 4]

    Args:
      mask: (n,), boolean.
      ranks: int32 of any shape, from 0.

    Returns:
      int32 of the shape of `ranks`; n for a rank that is not below the number of set entries.
    """
    bits = jnp.pad(mask, (0, -mask.size % (_WORD * _LANES))).reshape(-1, _WORD, _LANES)
    shifts = jnp.arange(_WORD, dtype=jnp.uint32)[:, None]
    words = jnp.sum(bits.astype(jnp.uint32) << shifts, axis=1, dtype=jnp.uint32).ravel()
    counts = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    ranks = ranks.astype(jnp.int32)
    index = jnp.searchsorted(ends, ranks, side="right").astype(jnp.int32)
    index = jnp.minimum(index, words.size - 1)
    word, left = words[index], ranks - (ends[index] - counts[index])
    # The set bit of the rank `left` within the word: in its lower half, or in its upper half.
    bit = jnp.zeros_like(left)
    for half in (16, 8, 4, 2, 1):
        lower = word & jnp.uint32((1 << half) - 1)
        count = lax.population_count(lower).astype(jnp.int32)
        above = left >= count
        bit += jnp.where(above, half, 0)
        left -= jnp.where(above, count, 0)
        word = jnp.where(above, word >> half, lower)
    place = (index // _LANES * _WORD + bit) * _LANES + index % _LANES
    return jnp.where(ranks < ends[-1], place, mask.size)


def first(mask: jax.Array, count: int | jax.Array) -> jax.Array:
    """Returns the mask of the first `count` set entries of a mask.

    >>> first(jnp.array([True, False, True, True]), 2).tolist()
    [True, False, True, False]
    """
    return mask & (jnp.arange(mask.size, dtype=jnp.int32) <= last_of_first(mask, count))


def last_of_first(mask: jax.Array, count: int | jax.Array) -> jax.Array:
    """Returns the place of the last of the first `count` set entries of a mask, int32.

    >>> int(last_of_first(jnp.array([True, False, True, True]), 2))
    2

    It is -1 for none, and not before the last set entry if there are fewer than `count`.
    """
    blocks = jnp.pad(mask, (0, -mask.size % _LANES)).reshape(-1, _LANES)
    ends = jnp.cumsum(jnp.sum(blocks, axis=1, dtype=jnp.int32))
    # The block in which the last one lies, and how many of its set entries are among the first.
    index = jnp.minimum(jnp.searchsorted(ends, jnp.asarray(count, jnp.int32)), len(ends) - 1)
    block = blocks[index]
    left = count - (ends[index] - jnp.sum(block, dtype=jnp.int32))
    in_block = jnp.sum(jnp.cumsum(block, dtype=jnp.int32) < left, dtype=jnp.int32)
    return jnp.where(jnp.asarray(count) > 0, index * _LANES + in_block, -1).astype(jnp.int32)


def largest(values: jax.Array, k: int) -> jax.Array:
    """Returns the mask of the k largest of the non-negative values; of equal ones, the first.

    >>> largest(jnp.array([1.0, 3.0, 1.0, 2.0]), 3).tolist()
    [True, True, False, True]
    """
    threshold = kth_largest(values, k)
    above = ~(values <= threshold)  # NaN is above every number
    above &= ~jnp.isnan(threshold)
    equal = (values == threshold) | (jnp.isnan(values) & jnp.isnan(threshold))
    return above | first(equal, k - jnp.sum(above, dtype=jnp.int32))
