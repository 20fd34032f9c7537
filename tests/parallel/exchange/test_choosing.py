"""Compares L-GreCo's choice, the least size within an error budget, with all possible choices."""

import itertools

import numpy as np
import pytest

from lamb_tpu.parallel.exchange import choosing


def table(seed: int, layers: int = 4, options: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    errors = np.sort(rng.uniform(0.1, 2, (layers, options)), axis=1)[:, ::-1]
    return errors, np.arange(1.0, options + 1) * rng.integers(5, 50, (layers, 1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [0.7, 1.2])
def test_least_size(seed: int, factor: float) -> None:
    errors, sizes = table(seed)
    layers, reference = np.arange(4), 1
    target = choosing.budget(errors, reference, factor)
    buckets = choosing.in_buckets(errors, target)
    assert choosing.budget(errors, reference, 1.0) == pytest.approx(errors[:, 1].sum())
    every = list(itertools.product(range(4), repeat=4))
    fitting = [c for c in every if buckets[layers, c].sum() < choosing.BUCKETS]
    actual = choosing.choose(errors, sizes, reference, factor)
    assert tuple(actual) in fitting and errors[layers, actual].sum() <= target
    assert sizes[layers, actual].sum() == min(sizes[layers, c].sum() for c in fitting)


def test_no_choice() -> None:
    errors, sizes = table(0)
    assert choosing.choose(errors, sizes, 1, 0.01) is None
    assert choosing.choose(np.zeros_like(errors), sizes, 1) is None
    broken = errors.copy()
    broken[0, 1] = np.nan  # an error of the reference option, so the budget is NaN
    assert choosing.choose(broken, sizes, 1) is None


def test_an_option_without_a_finite_error_is_not_taken() -> None:
    errors, sizes = table(0)
    expected = choosing.choose(errors, sizes, 1, 1.2)
    errors = np.concatenate([errors, np.full((4, 1), np.nan)], axis=1)
    sizes = np.concatenate([sizes, np.zeros((4, 1))], axis=1)
    actual = choosing.choose(errors, sizes, 1, 1.2)
    assert 4 not in actual and actual == expected
