"""The hash: SplitMix64's outputs, uniformity, and independence of neighbouring coordinates."""

import warnings

import numpy as np
import pytest

from lamb_tpu.data import hashing

MASK = 2**64 - 1


def mix(state: int) -> int:
    """SplitMix64's finaliser in Python integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def test_words_are_those_of_plain_integers() -> None:
    def plain(seed: int, *coordinates: int) -> int:
        state = mix(seed)
        for coordinate in coordinates:
            state = mix((state + (coordinate + 1) * 0x9E3779B97F4A7C15) & MASK)
        return state

    rows, columns = np.arange(3)[:, None], np.array([0, 5, 2**40])
    actual = hashing.words(2**64 - 1, rows, 7, columns)
    expected = [[plain(2**64 - 1, row, 7, int(column)) for column in columns] for row in range(3)]
    assert actual.dtype == np.uint64 and actual.tolist() == expected
    # Checks the finaliser against the first output of SplitMix64 with seed 0.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_scalars_need_no_array_and_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hashing.words(3, 1, 2).shape == ()
        assert hashing.words(3, 1, 2) == hashing.words(3, np.array([1]), 2)[0]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_coordinate_spreads_evenly(axis: int) -> None:
    coordinates = [np.array([5]), np.array([5]), np.array([5])]
    coordinates[axis] = np.arange(200_000)
    drawn = hashing.below(hashing.words(11, *coordinates), 100)
    counts = np.bincount(drawn, minlength=100)
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert len(counts) == 100 and 50 < chi_square < 160  # 99 degrees of freedom: 99 +- 14
    values = hashing.uniform(hashing.words(11, *coordinates))
    assert 0 <= values.min() and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.004 and abs(values.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.01


def test_seeds_and_coordinates_are_independent() -> None:
    places = np.arange(50_000)
    draws = [
        hashing.uniform(hashing.words(seed, *c))
        for seed, c in [(0, (places, 1)), (1, (places, 1)), (0, (places, 2)), (0, (1, places))]
    ]
    correlations = np.corrcoef(draws) - np.eye(4)
    assert np.abs(correlations).max() < 0.02
