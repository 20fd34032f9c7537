"""Tests PowerSGD: sums over devices, errors, stages, and sent bytes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.cost import traffic
from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny
from tests.parallel.exchange import over
from tests.parallel.wire import wire_bytes
from tests.raising import rejected

WORKERS = 4


def powersgd(**options: Any) -> PowerSGD:
    return PowerSGD(over.AXES, WORKERS, **{"rank": 2, "min_saving": 1.0} | options)


def gradients(count: int, **shapes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    return over.gradients(shapes, count, WORKERS)


def total(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: leaf.sum(axis=0, dtype=np.float64) for name, leaf in grads.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"iterations": 2},
        {"alternate": True},
        {"alternate": True, "iterations": 3},
        {"warm_start": False},
        {"rank": 1},
    ],
    ids=str,
)
def test_unsent_values_are_in_the_error(options) -> None:
    updates = gradients(6, kernel=(12, 20), bias=(7,), conv=(3, 3, 4, 30))
    actual, residuals = over.run(powersgd(**options), updates)
    for name in updates[0]:
        sent = np.sum([sums[name] for sums in actual], axis=0, dtype=np.float64)
        given = np.sum([total(grads)[name] for grads in updates], axis=0)
        kept = residuals[-1].device[name].sum(axis=0) if name != "bias" else 0
        np.testing.assert_allclose(sent + kept, given, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(actual[0]["bias"], total(updates[0])["bias"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(actual[0]["kernel"], total(updates[0])["kernel"], atol=0.1)


def test_a_matrix_of_low_rank_is_sent_exactly() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.normal(size=(WORKERS, 12, 2)), rng.normal(size=(2, 20))
    grads = {"kernel": (left @ right).astype(np.float32)}
    actual, residuals = over.run(powersgd(), [grads])
    np.testing.assert_allclose(actual[0]["kernel"], total(grads)["kernel"], rtol=1e-3, atol=1e-4)
    assert np.abs(residuals[-1].device["kernel"].sum(axis=0)).max() < 1e-3
    assert np.abs(residuals[-1].device["kernel"]).max() > 1  # devices' errors have opposite signs


@pytest.mark.long
def test_warm_start_finds_the_leading_directions() -> None:
    """With a constant gradient and no error feedback, the sums approach the best approximation."""
    (grads,) = gradients(1, kernel=(12, 20))
    left, values, right = np.linalg.svd(total(grads)["kernel"])
    best = left[:, :2] * values[:2] @ right[:2]
    distances = []
    for options in (
        {},
        {"warm_start": False},
        {"alternate": True},
        {"iterations": 20, "min_saving": 0.0},
    ):
        actual, residuals = over.run(powersgd(error_feedback=False, **options), [grads] * 40)
        distances.append(np.abs(actual[-1]["kernel"] - best).max())
        assert residuals[-1].device == ()
    warm, fresh, alternate, many = distances
    # An alternating update makes only half of an iteration.
    assert max(warm, many) < 1e-4 and alternate < 1e-2 < 0.1 < fresh


@pytest.mark.long
def test_stacked_layers_are_matrices_of_their_own() -> None:
    updates = gradients(3, layers=(5, 12, 20))
    actual, _ = over.run(powersgd(stacked=("layers",)), updates)
    for layer in range(5):
        alone, _ = over.run(powersgd(), [{"layers": g["layers"][:, layer]} for g in updates])
        # Random numbers differ, so only the rank is comparable.
        for sums in (actual[2]["layers"][layer], alone[2]["layers"]):
            assert np.linalg.matrix_rank(sums, tol=1e-4) == 2


@pytest.mark.long
@pytest.mark.parametrize("alternate", [False, True])
def test_a_gradient_that_was_zero_is_sent_when_it_comes(alternate) -> None:
    updates = gradients(4, kernel=(12, 20))
    for grads in updates[:2]:
        grads["kernel"] *= 0
    actual, residuals = over.run(powersgd(alternate=alternate), updates)
    assert not actual[1]["kernel"].any()
    assert np.linalg.norm(actual[2]["kernel"]) > 0.2 * np.linalg.norm(total(updates[2])["kernel"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(residuals[-1]))


def test_everything_is_uncompressed_before_the_start() -> None:
    exchange = powersgd(start=3, alternate=True)
    assert exchange.at(0) == exchange.at(2) and hash(exchange.at(0)) == hash(exchange.at(2))
    assert len({exchange.at(step) for step in range(10)}) == 3
    assert len({powersgd(start=3).at(step) for step in range(10)}) == 2
    updates = gradients(4, kernel=(12, 20))
    actual, _ = over.run(exchange, updates)
    for step in range(3):
        np.testing.assert_allclose(
            actual[step]["kernel"], total(updates[step])["kernel"], rtol=1e-5, atol=1e-5
        )
    assert np.linalg.matrix_rank(actual[3]["kernel"], tol=1e-4) == 2


def test_small_matrices_are_uncompressed() -> None:
    updates = gradients(1, narrow=(50, 2), small=(6, 6), kernel=(12, 20))
    exchange = powersgd()
    assert [m.path for m in exchange.matrices(updates[0])] == ["kernel", "narrow", "small"]
    shapes = {name: jnp.zeros(leaf.shape[1:]) for name, leaf in updates[0].items()}
    assert [m.path for m in exchange.matrices(shapes)] == ["kernel", "small"]
    assert [m.path for m in dataclasses.replace(exchange, rank=3).matrices(shapes)] == ["kernel"]


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"rank": 0}, "is out of range"),
        ({"rank": 1.5}, "is out of range"),
        ({"start": -1}, "is out of range"),
        ({"iterations": 0}, "is out of range"),
        ({"min_saving": -1.0}, "is out of range"),
        ({"alternate": True, "warm_start": False}, "computes each factor from the previous one"),
        ({"stacked": ("(",)}, "is not a tuple of regular expressions"),
        ({"stacked": "layers"}, "is not a tuple of regular expressions"),
    ],
)
def test_wrong_options(options, problem) -> None:
    key, value = next(iter(options.items()))
    with rejected(key, value, problem, kind=ArgumentError):
        powersgd(**options)


@pytest.mark.parametrize(
    "options, shape, key, value, problem",
    [
        ({"rank": 10}, (8, 9), "rank", 10, "in every matrix: the largest is a with 8 x 9"),
        ({}, (9,), "rank", 2, "needs a matrix"),
        ({"stacked": ("layers",)}, (20, 30), "stacked", "layers", "matches no parameter"),
    ],
)
def test_parameters_that_do_not_fit(options, shape, key, value, problem) -> None:
    with rejected(key, value, problem, kind=ArgumentError):
        powersgd(**options).init({"a": jax.ShapeDtypeStruct(shape, jnp.float32)})


@pytest.mark.long
@pytest.mark.parametrize("alternate", [False, True])
def test_only_factors_and_vectors_are_on_the_wire(alternate) -> None:
    shapes = {"a": (512, 1024), "b": (3, 3, 64, 256), "c": (600, 500), "bias": (1000,)}
    matrices = [(512, 1024), (576, 256), (600, 500)]
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    exchange = PowerSGD(("data",), 8, rank=4, alternate=alternate).at(0)
    text = over.program(exchange, make_mesh(tiny.digits().mesh), params)
    sides = sum(m if alternate else n + m for n, m in matrices)
    least = 2 * 7 / 8 * 4 * (4 * sides + 1000)
    sent = wire_bytes(text)
    assert sent.keys() == {"f32"} and least <= sent["f32"] <= 1.05 * least
    assert sum(one.count for one in traffic.collectives(text)) == (1 if alternate else 2)


def test_a_reset_keeps_the_factors() -> None:
    """Zero factors would make all later sums exactly 0."""
    for alternate in (False, True):
        exchange = PowerSGD(over.AXES, 8, rank=1, alternate=alternate)
        every = over.gradients({"kernel": (12, 10)}, 2)
        _, residuals = over.run(exchange, every[:1])
        actual = exchange.reset(residuals[0])
        assert np.any(residuals[0].device["kernel"]) and not np.any(actual.device["kernel"])
        assert actual.whole is residuals[0].whole
        (sums,), _ = over.run(exchange, every[1:], actual)
        assert np.linalg.norm(sums["kernel"]) > 0.1
