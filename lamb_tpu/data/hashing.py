"""Random 64-bit words, computed as a hash of their coordinates; and the SHA-256 of a file.

Making a random generator for each example would take longer than making the example. A hash of
(seed, epoch, index, ...) takes a few vector operations for a full batch, and is the same in every
NumPy version.
"""

import hashlib
import os

import numpy as np

from lamb_tpu.files import reading

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
        # The product must wrap around; unlike scalars, arrays do so without a warning.
        value = np.atleast_1d(coordinate).astype(np.uint64)
        # Adds 1, so that a coordinate of 0 changes the state too.
        state = _mix(state + (value + np.uint64(1)) * _INCREMENT)
    return state.reshape(np.broadcast_shapes(*(np.shape(item) for item in coordinates)))


def uniform(random_words: np.ndarray) -> np.ndarray:
    """Maps random words to float64 in [0, 1)."""
    # Uses the upper 53 bits, because a float64 holds 53 bits exactly.
    return (random_words >> np.uint64(11)) * 2.0**-53


def below(random_words: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Maps random words to int64 in 0 ... `bound` - 1, for bounds of 1 to 2**32 - 1."""
    # The product of two 32-bit numbers fits into 64 bits, and its upper half is less than the
    # bound. The bias is at most bound / 2^32.
    high = random_words >> np.uint64(32)
    return ((high * np.asarray(bound).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def sha256(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file's content; raises the same errors as `reading.open_file`."""
    with reading.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mix(state: np.ndarray) -> np.ndarray:
    # Shifts and factors of SplitMix64's finaliser.
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
