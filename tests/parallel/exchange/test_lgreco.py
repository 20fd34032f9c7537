"""Tests L-GreCo with PowerSGD: measured errors, chosen ranks, and the number of programs."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.lgreco import LGreCo, squared_errors
from tests.parallel.exchange import over
from tests.raising import rejected

WORKERS = 2
SHAPES = {"a": (30, 20), "b": (40, 12), "bias": (5,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def lgreco(**options: Any) -> LGreCo:
    return LGreCo(("workers",), WORKERS, **{"rank": 2, "interval": 3, "min_saving": 1.0} | options)


def gradients(step: int) -> dict[str, np.ndarray]:
    """Returns gradients in which one direction dominates matrix b, and none dominates matrix a."""
    rng = np.random.default_rng(step)
    grads = {k: rng.normal(size=(WORKERS, *s)).astype(np.float32) for k, s in SHAPES.items()}
    left, right = np.random.default_rng(99).normal(size=(2, 40))
    grads["b"] = (0.01 * grads["b"] + np.outer(left, right[:12])).astype(np.float32)
    return grads


@functools.cache
def program(stage: LGreCo) -> Any:
    return jax.jit(jax.vmap(stage.reduce, axis_name="workers"))


def whole(residual: Residual) -> dict[str, Any]:
    return jax.tree.map(lambda x: x[0], residual.whole)


def run(exchange: LGreCo, updates: int) -> tuple[LGreCo, Residual, list[Any]]:
    """Makes updates, and chooses ranks when a choice is due, as the trainer does.

    Returns the exchange, the last residual, and the sums of each update.
    """
    residual, actual = over.start(exchange, PARAMS), []
    for step in range(updates):
        if exchange.due(step):
            exchange = exchange.chosen(PARAMS, whole(residual))
        sums, residual = program(exchange.at(step))(gradients(step), residual)
        actual.append(sums)
    return exchange, residual, actual


@pytest.mark.long
@pytest.mark.parametrize("measure", ["power", "svd"])
def test_errors_are_those_of_the_best_approximations(measure: str) -> None:
    rng = np.random.default_rng(0)
    matrices = np.float32(rng.normal(size=(2, 30, 12)) * 0.5 ** np.arange(12))
    begin = jnp.asarray(rng.normal(size=(2, 12, 6)), jnp.float32)
    actual = squared_errors(jnp.asarray(matrices), begin, range(1, 7), measure)
    for rank in range(
        1, 7
    ):  # the error of each rank equals that of a measurement with this rank only
        alone = squared_errors(jnp.asarray(matrices), begin[:, :, :rank], [rank], measure)
        np.testing.assert_allclose(alone[0], actual[rank - 1], rtol=1e-4)
    squares = np.square(np.linalg.svd(matrices, compute_uv=False)).sum(axis=0)
    expected = [squares[rank:].sum() for rank in range(1, 7)]
    np.testing.assert_allclose(actual, expected, rtol=2e-2)


def test_errors_of_ranks_above_the_side_are_those_of_the_side() -> None:
    matrix = np.float32(np.random.default_rng(0).normal(size=(1, 9, 3)))
    actual = squared_errors(jnp.asarray(matrix), jnp.ones((1, 3, 3)), range(1, 7), "svd")
    assert actual.shape == (6,) and not actual[2:].any() and actual[1] > 0


@pytest.mark.long
def test_ranks_follow_the_measured_errors() -> None:
    exchange, residual, actual = run(lgreco(), 4)
    assert exchange.ranks == exchange.chosen(PARAMS, whole(residual)).ranks
    # Rank 1 gives matrix b a small error, so the budget allows matrix a a higher rank.
    assert exchange.options == range(1, 5) and exchange.ranks[1] == 1 < exchange.ranks[0]
    assert np.asarray(whole(residual)["choices"])[:3].tolist() == [
        [2, 2],
        [*exchange.ranks],
        [0, 0],
    ]
    given = [gradients(step) for step in range(4)]
    for name in SHAPES:  # with any ranks, unsent values are in the error
        sent = sum(np.float64(sums[name][0]) for sums in actual)
        kept = residual.device["error"][name].sum(axis=0) if name != "bias" else 0
        total = sum(np.float64(grads[name]).sum(axis=0) for grads in given)
        np.testing.assert_allclose(sent + kept, total, atol=1e-3)
    assert np.linalg.matrix_rank(actual[3]["a"][0], tol=1e-3) == exchange.ranks[0]


@pytest.mark.long
def test_measured_errors_are_over_all_devices() -> None:
    _, residual, _ = run(lgreco(measure="svd", error_feedback=False), 3)
    squares = np.zeros((2, 4))
    for row, name in zip(squares, ("a", "b"), strict=True):
        for worker in range(WORKERS):
            average = np.mean([gradients(step)[name][worker] for step in range(3)], axis=0)
            np.testing.assert_allclose(
                residual.device["average"][name][worker, 0], average, atol=1e-6
            )
            values = np.linalg.svd(average, compute_uv=False) ** 2
            row += [values[rank:].sum() for rank in range(1, 5)]
    np.testing.assert_allclose(whole(residual)["errors"], np.sqrt(squares), rtol=1e-4)


def test_the_choice_is_the_same_until_the_next_is_due() -> None:
    exchange, residual = lgreco(), over.start(lgreco(), PARAMS)
    for step in range(8):
        again = exchange.chosen(PARAMS, whole(residual))
        if exchange.due(step):
            exchange = again
        assert again == exchange  # as in a run that resumes here
        _, residual = program(exchange.at(step))(gradients(step), residual)
    assert [step for step in range(8) if exchange.due(step)] == [3, 6]
    assert [step for step in range(12) if lgreco(start=2).due(step)] == [5, 8, 11]


ERRORS = np.array([[2.5, 2.0, 1.5, 1.2], [2.2, 2.0, 1.5, 1.4]])


def test_number_of_programs_is_bounded() -> None:
    exchange = lgreco(max_programs=2, factor=1.1)
    state = {"errors": ERRORS, "choices": np.array([[2, 2], [1, 4]])}
    free = lgreco(factor=1.1).chosen(PARAMS, {**state, "choices": np.zeros((8, 2), int)})
    assert free.ranks == (2, 1)
    assert exchange.chosen(PARAMS, state).ranks == (2, 2)
    # If no known choice is within the budget, the choice with the least error is taken.
    state["choices"] = np.array([[1, 1], [1, 2]])
    assert exchange.chosen(PARAMS, state).ranks == (1, 2)


def test_parts_of_an_inner_axis_have_one_choice() -> None:
    exchange = lgreco(factor=1.1)
    state = {"errors": ERRORS / np.sqrt(2), "choices": np.zeros((8, 2), int)}
    both = {name: np.stack([value] * 2) for name, value in state.items()}
    assert exchange.chosen(PARAMS, both) == exchange.chosen(PARAMS, state)
    assert exchange.chosen(PARAMS, both).ranks


@pytest.mark.parametrize(
    "key, value, problem",
    [
        ("rank", 0, "is out of range"),
        ("interval", 0, "is out of range"),
        ("lower", 1.5, "with upper=2.0 is out of range"),
        ("factor", 0.0, "is out of range"),
        ("measure", "qr", "is unknown"),
        ("max_programs", 0, "is out of range"),
    ],
)
def test_wrong_options(key: str, value: Any, problem: str) -> None:
    with rejected(key, value, problem, kind=ArgumentError):
        lgreco(**{key: value})


def test_a_reset_keeps_factors_and_measurements() -> None:
    exchange = LGreCo(over.AXES, 8, rank=1, interval=2)
    every = over.gradients({"kernel": (12, 10)}, 3)
    _, residuals = over.run(exchange, every[:2])
    actual = exchange.reset(residuals[-1])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(actual.device))
    assert actual.whole is residuals[-1].whole and np.any(actual.whole["errors"])
    (sums,), _ = over.run(exchange, every[2:], actual)
    assert np.linalg.norm(sums["kernel"]) > 0.1


def test_a_skipped_update_counts_and_starts_its_window_empty() -> None:
    """A skipped update advances the count. If it begins a window, the previous average is discarded."""
    exchange = LGreCo(over.AXES, 8, rank=1, interval=2)
    every = over.gradients({"kernel": (12, 10)}, 3)
    _, residuals = over.run(exchange, every)
    for before, after in itertools.pairwise(residuals):
        actual = exchange.skipped(before, after)
        begins = int(before.whole["count"][0]) % 2 == 0
        assert np.array_equal(actual.whole["count"], after.whole["count"])
        assert np.any(actual.device["average"]["kernel"]) != begins
        assert actual.device["error"] is before.device["error"]
        assert actual.whole["errors"] is before.whole["errors"]
