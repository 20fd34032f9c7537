"""Random words as a hash of their coordinates, for many coordinates at once.

A random generator for each example would cost more than the example itself. A hash of (seed, epoch,
index, ...) costs a few vector operations for a whole batch, and is the same in every NumPy version.
"""

import numpy as np

# SplitMix64's increment: 2^64 divided by the golden ratio, made odd.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def words(seed: int, *coordinates: np.ndarray | int) -> np.ndarray:
    """Returns one random 64-bit word for each combination of coordinates.

    The finaliser of SplitMix64 mixes in every coordinate (Steele, Lea and Flood, "Fast Splittable
    Pseudorandom Number Generators", OOPSLA 2014).

    Args:
      seed: 0 to 2**64 - 1.
      *coordinates: non-negative integers, or arrays of them that broadcast together.

    Returns:
      uint64, of the shape to which the coordinates broadcast.
    """
    state = _mix(np.array([seed], np.uint64))
    for coordinate in coordinates:
        # The product must wrap around; arrays, unlike scalars, do so without a warning.
        place = np.atleast_1d(coordinate).astype(np.uint64)
        # 1 is added, so that a coordinate of 0 changes the state too.
        state = _mix(state + (place + np.uint64(1)) * _INCREMENT)
    return state.reshape(np.broadcast_shapes(*(np.shape(item) for item in coordinates)))


def uniform(random_words: np.ndarray) -> np.ndarray:
    """Maps random words to float64 in [0, 1)."""
    # A float64 holds 53 bits.
    return (random_words >> np.uint64(11)) * 2.0**-53


def below(random_words: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Maps random words to int64 in 0 ... `bound` - 1, for bounds of 1 to 2**32 - 1."""
    # The product of two 32-bit numbers fits 64 bits, and its upper half is below the bound. The
    # bias is at most bound / 2^32.
    high = random_words >> np.uint64(32)
    return ((high * np.asarray(bound).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def _mix(state: np.ndarray) -> np.ndarray:
    # Shifts and factors of SplitMix64's finaliser.
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
