"""L-GreCo over PowerSGD: measured errors, chosen ranks, and how many programs there are."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.lgreco import LGreCo, squared_errors
from tests.parallel.exchange import over

WORKERS = 2
SHAPES = {"a": (30, 20), "b": (40, 12), "bias": (5,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def lgreco(**options: Any) -> LGreCo:
    return LGreCo(("workers",), WORKERS, **{"rank": 2, "interval": 3, "min_saving": 1.0} | options)


def gradients(step: int) -> dict[str, np.ndarray]:
    """Of b one direction is all that counts, of a none."""
    rng = np.random.default_rng(step)
    grads = {k: rng.normal(size=(WORKERS, *s)).astype(np.float32) for k, s in SHAPES.items()}
    left, right = np.random.default_rng(99).normal(size=(2, 40))
    grads["b"] = (0.01 * grads["b"] + np.outer(left, right[:12])).astype(np.float32)
    return grads


@functools.cache
def program(stage: LGreCo) -> Any:
    return jax.jit(jax.vmap(stage.reduce, axis_name="workers"))


def start(exchange: LGreCo) -> Residual:
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), exchange.init(PARAMS))


def whole(residual: Residual) -> dict[str, Any]:
    return jax.tree.map(lambda x: x[0], residual.whole)


def run(exchange: LGreCo, updates: int) -> tuple[LGreCo, Residual, list[Any]]:
    """Updates with a choice where one is due, as the trainer has them."""
    residual, found = start(exchange), []
    for step in range(updates):
        if exchange.due(step):
            exchange = exchange.chosen(PARAMS, whole(residual))
        sums, residual = program(exchange.at(step))(gradients(step), residual)
        found.append(sums)
    return exchange, residual, found


@pytest.mark.long
@pytest.mark.parametrize("measure", ["power", "svd"])
def test_errors_are_those_of_the_best_approximations(measure: str) -> None:
    rng = np.random.default_rng(0)
    matrices = np.float32(rng.normal(size=(2, 30, 12)) * 0.5 ** np.arange(12))
    begin = jnp.asarray(rng.normal(size=(2, 12, 6)), jnp.float32)
    found = squared_errors(jnp.asarray(matrices), begin, range(1, 7), measure)
    for rank in range(1, 7):  # each is that of a measurement at this rank alone
        alone = squared_errors(jnp.asarray(matrices), begin[:, :, :rank], [rank], measure)
        np.testing.assert_allclose(alone[0], found[rank - 1], rtol=1e-4)
    squares = np.square(np.linalg.svd(matrices, compute_uv=False)).sum(axis=0)
    expected = [squares[rank:].sum() for rank in range(1, 7)]
    np.testing.assert_allclose(found, expected, rtol=2e-2)


def test_errors_of_ranks_above_the_side_are_those_of_the_side() -> None:
    matrix = np.float32(np.random.default_rng(0).normal(size=(1, 9, 3)))
    found = squared_errors(jnp.asarray(matrix), jnp.ones((1, 3, 3)), range(1, 7), "svd")
    assert found.shape == (6,) and not found[2:].any() and found[1] > 0


@pytest.mark.long
def test_ranks_follow_the_measured_errors() -> None:
    exchange, residual, found = run(lgreco(), 4)
    assert exchange.ranks == exchange.chosen(PARAMS, whole(residual)).ranks
    # b needs one direction; what it saves goes to a.
    assert exchange.options == range(1, 5) and exchange.ranks[1] == 1 < exchange.ranks[0]
    assert np.asarray(whole(residual)["choices"])[:3].tolist() == [
        [2, 2],
        [*exchange.ranks],
        [0, 0],
    ]
    given = [gradients(step) for step in range(4)]
    for name in SHAPES:  # whatever the ranks, what is not sent is kept
        sent = sum(np.float64(sums[name][0]) for sums in found)
        kept = residual.device["error"][name].sum(axis=0) if name != "bias" else 0
        total = sum(np.float64(grads[name]).sum(axis=0) for grads in given)
        np.testing.assert_allclose(sent + kept, total, atol=1e-3)
    assert np.linalg.matrix_rank(found[3]["a"][0], tol=1e-3) == exchange.ranks[0]


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
    exchange, residual = lgreco(), start(lgreco())
    for step in range(8):
        again = exchange.chosen(PARAMS, whole(residual))
        if exchange.due(step):
            exchange = again
        assert again == exchange  # as a run that is resumed here has it
        _, residual = program(exchange.at(step))(gradients(step), residual)
    assert [step for step in range(8) if exchange.due(step)] == [3, 6]
    assert [step for step in range(12) if lgreco(start=2).due(step)] == [5, 8, 11]


def test_number_of_programs_is_bounded() -> None:
    exchange = lgreco(max_programs=2, factor=1.1)
    state = {
        "errors": np.array([[2.5, 2.0, 1.5, 1.2], [2.2, 2.0, 1.5, 1.4]]),
        "choices": np.array([[2, 2], [1, 4]]),
    }
    free = lgreco(factor=1.1).chosen(PARAMS, {**state, "choices": np.zeros((8, 2), int)})
    assert free.ranks == (2, 1)
    assert exchange.chosen(PARAMS, state).ranks == (2, 2)
    # None is within the budget: that of the least error.
    state["choices"] = np.array([[1, 1], [1, 2]])
    assert exchange.chosen(PARAMS, state).ranks == (1, 2)


def test_parts_of_an_inner_axis_have_one_choice() -> None:
    exchange, state = (
        lgreco(factor=1.1),
        {
            "errors": np.array([[2.5, 2.0, 1.5, 1.2], [2.2, 2.0, 1.5, 1.4]]) / np.sqrt(2),
            "choices": np.zeros((8, 2), int),
        },
    )
    both = {name: np.stack([value] * 2) for name, value in state.items()}
    assert exchange.chosen(PARAMS, both) == exchange.chosen(PARAMS, state)
    assert exchange.chosen(PARAMS, both).ranks


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 0}, "rank is 0"),
        ({"interval": 0}, "interval is 0"),
        ({"lower": 1.5}, "lower is"),
        ({"factor": 0.0}, "factor is 0.0"),
        ({"measure": "qr"}, "measure is 'qr'; known: power, svd"),
        ({"max_programs": 0}, "max_programs is 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgreco(**options)


def test_a_reset_keeps_factors_and_measurements() -> None:
    exchange = LGreCo(over.AXES, 8, rank=1, interval=2)
    every = over.gradients({"kernel": (12, 10)}, 3)
    _, residuals = over.run(exchange, every[:2])
    found = exchange.reset(residuals[-1])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.device))
    assert found.whole is residuals[-1].whole and np.any(found.whole["errors"])
    (sums,), _ = over.run(exchange, every[2:], found)
    assert np.linalg.norm(sums["kernel"]) > 0.1


def test_a_skipped_update_counts_and_starts_its_window_empty() -> None:
    """`due` goes by updates. Each window of 2 discards the average of the window before."""
    exchange = LGreCo(over.AXES, 8, rank=1, interval=2)
    every = over.gradients({"kernel": (12, 10)}, 3)
    _, residuals = over.run(exchange, every)
    for before, after in itertools.pairwise(residuals):
        found = exchange.skipped(before, after)
        begins = int(before.whole["count"][0]) % 2 == 0
        assert np.array_equal(found.whole["count"], after.whole["count"])
        assert np.any(found.device["average"]["kernel"]) != begins
        assert found.device["error"] is before.device["error"]
        assert found.whole["errors"] is before.whole["errors"]
