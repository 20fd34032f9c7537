"""The largest values of a vector, and the indices at which a mask is set, without a sort.

Sorting an entire gradient takes a hundred times as long as reading it, and a TPU executes a scatter
of all values serially. Here counting values gives a threshold, and counting set bits gives indices.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

_WORD = 32  # number of mask entries that are packed into a word and counted together
# The entries of a word are 128 apart. If they were 32 neighbours, a TPU would pad the axis of 32 to
# 128, the width of its registers, and a mask of 100 MB would need 2 GB.
_LANES = 128


def kth_largest(values: jax.Array, k: int | jax.Array) -> jax.Array:
    """Returns the exact k-th largest of non-negative float32 or float64 values; k counts from 1.

    The bits of non-negative floating-point numbers, read as integers, have the same order as the
    numbers. Each pass finds the next two bits of the result, beginning with the highest bits: for
    each candidate, it counts the values that are at least as large. NaN counts as the largest value.

    >>> float(kth_largest(jnp.array([3.0, 1.0, 2.0, 2.0]), 2))
    2.0
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
    """Returns the number of set entries of each mask, int32; all masks have the same length.

    On a CPU, a single reduction is several times as fast as one sum per mask.
    """
    return lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [jnp.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        (0,),
    )


def places(mask: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns, for each rank, the index of a set entry of the mask.

    Distinct ranks give distinct indices. In a mask of more than 128 entries, the order of the ranks
    is not that of the indices.

    >>> places(jnp.array([False, True, False, True]), jnp.arange(3)).tolist()
    [1, 3, 4]

    Ranks count from 0. If a rank is not below the number of set entries, its index is the length of
    the mask.
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
    # Find the set bit with rank `left` within the word by bisection.
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
    """Returns the index of the `count`-th set entry of a mask, counted from 1, int32.

    >>> int(last_of_first(jnp.array([True, False, True, True]), 2))
    2

    The index is -1 if `count` is 0. If fewer than `count` entries are set, the result is at or after
    the last set entry.
    """
    blocks = jnp.pad(mask, (0, -mask.size % _LANES)).reshape(-1, _LANES)
    ends = jnp.cumsum(jnp.sum(blocks, axis=1, dtype=jnp.int32))
    # The block that contains the result, and the number of its set entries up to the result.
    index = jnp.minimum(jnp.searchsorted(ends, jnp.asarray(count, jnp.int32)), len(ends) - 1)
    block = blocks[index]
    left = count - (ends[index] - jnp.sum(block, dtype=jnp.int32))
    in_block = jnp.sum(jnp.cumsum(block, dtype=jnp.int32) < left, dtype=jnp.int32)
    return jnp.where(jnp.asarray(count) > 0, index * _LANES + in_block, -1).astype(jnp.int32)


def largest(values: jax.Array, k: int) -> jax.Array:
    """Returns the mask of the k largest non-negative values; among equal values, the first are set.

    >>> largest(jnp.array([1.0, 3.0, 1.0, 2.0]), 3).tolist()
    [True, True, False, True]
    """
    threshold = kth_largest(values, k)
    above = ~(values <= threshold)  # NaN is larger than every number
    above &= ~jnp.isnan(threshold)
    equal = (values == threshold) | (jnp.isnan(values) & jnp.isnan(threshold))
    return above | first(equal, k - jnp.sum(above, dtype=jnp.int32))
