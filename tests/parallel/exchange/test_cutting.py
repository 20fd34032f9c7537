"""Compares thresholds and selections with a Python version of the loop of DGC's authors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange import cutting

SIZE, BUDGET = 4_000, 100


def magnitudes(kind: str = "normal") -> np.ndarray:
    rng = np.random.default_rng(3)
    values = rng.normal(size=SIZE) if kind == "normal" else rng.pareto(0.5, SIZE)
    return np.abs(values).astype(np.float32)


def looped(values: np.ndarray, threshold: np.float32, resample: bool) -> tuple[np.float32, int]:
    """Returns the threshold of the authors' loop, and how often the loop changed the threshold."""
    step = 0
    while step < 10:
        actual = (values >= threshold).sum()
        if actual < 80:
            threshold *= np.float32(0.8)
        elif actual > 130 and not resample:
            threshold *= np.float32(1.3)
        else:
            break
        step += 1
    return threshold, step


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_thresholds_are_those_of_the_loop(kind: str) -> None:
    values = magnitudes(kind)
    lowered = jax.jit(lambda x, threshold: cutting.lowered(x, threshold, BUDGET))
    adapted = jax.jit(lambda x, threshold: cutting.adapted(x, threshold, BUDGET))
    steps = set()
    ordered = np.sort(values)[::-1]
    # The thresholds range from values that select nothing, even after ten changes, to 0, which
    # selects everything.
    for start in (*100 * ordered[:2], *ordered[[0, 3, 20, 60, 79, 80, 100, 129, 131, 900]], 0):
        expected, step = looped(values, np.float32(start), True)
        threshold, exact = lowered(values, np.float32(start))
        assert threshold == expected
        assert exact == ((values >= expected).sum() > 130 and step < 10)
        steps.add(step)
        assert adapted(values, np.float32(start)) == looped(values, np.float32(start), False)[0]
    assert {0, 10} < steps


@pytest.mark.parametrize("all_above", [True, False])
def test_mask_is_the_first_and_those_above(all_above: bool) -> None:
    values = np.array([2, 1, 0, 2, 1, 3, 1], np.float32)
    cut = cutting.Cut(jnp.float32(1), jnp.int32(3), jnp.bool_(all_above))
    expected = [1, 1, 0, 1, 0, all_above, 0]
    assert cut.mask(jnp.asarray(values)).astype(int).tolist() == expected


@pytest.mark.parametrize("budget", [1, 40, 100, 5_000])
def test_first_of_the_values_that_are_not_below(budget: int) -> None:
    values = magnitudes()
    threshold = np.sort(values)[-100]
    mask = cutting.first(jnp.asarray(values), jnp.asarray(threshold), budget).mask(
        jnp.asarray(values)
    )
    assert np.flatnonzero(mask).tolist() == np.flatnonzero(values >= threshold)[:budget].tolist()
