"""PowerSGD: its sums, its errors, its stages, and what it sends."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.cost import traffic
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny
from tests.parallel.exchange import over
from tests.parallel.wire import wire_bytes

WORKERS = 4


def powersgd(**options: Any) -> PowerSGD:
    return PowerSGD(("workers",), WORKERS, **{"rank": 2, "min_saving": 1.0} | options)


def run(exchange: PowerSGD, updates: list[Any]) -> tuple[list[Any], Residual]:
    """Returns the sums of each update, whose leaves are (workers, *shape), and the residual."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), updates[0])
    residual = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), exchange.init(shapes))
    found, programs = [], {}
    for step, grads in enumerate(updates):
        stage = exchange.at(step)
        if stage not in programs:
            programs[stage] = jax.jit(jax.vmap(stage.reduce, axis_name="workers"))
        sums, residual = programs[stage](grads, residual)
        found.append(sums)
    return found, residual


def gradients(count: int, **shapes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            name: rng.normal(size=(WORKERS, *shape)).astype(np.float32)
            for name, shape in shapes.items()
        }
        for _ in range(count)
    ]


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
def test_what_is_not_sent_is_kept(options) -> None:
    updates = gradients(6, kernel=(12, 20), bias=(7,), conv=(3, 3, 4, 30))
    found, residual = run(powersgd(**options), updates)
    for name in updates[0]:
        sent = np.sum([sums[name][0] for sums in found], axis=0, dtype=np.float64)
        given = np.sum([total(grads)[name] for grads in updates], axis=0)
        kept = residual.device[name].sum(axis=0) if name != "bias" else 0
        np.testing.assert_allclose(sent + kept, given, rtol=1e-5, atol=1e-4)
    for sums in found:
        for leaf in jax.tree.leaves(sums):  # the same on each worker
            assert (leaf == leaf[:1]).all()
    for leaf in jax.tree.leaves(residual.whole):
        assert (leaf == leaf[:1]).all()
    np.testing.assert_allclose(found[0]["bias"][0], total(updates[0])["bias"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(found[0]["kernel"][0], total(updates[0])["kernel"], atol=0.1)


def test_a_matrix_of_low_rank_is_sent_exactly() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.normal(size=(WORKERS, 12, 2)), rng.normal(size=(2, 20))
    grads = {"kernel": (left @ right).astype(np.float32)}
    found, residual = run(powersgd(), [grads])
    np.testing.assert_allclose(found[0]["kernel"][0], total(grads)["kernel"], rtol=1e-3, atol=1e-4)
    assert np.abs(residual.device["kernel"].sum(axis=0)).max() < 1e-3
    assert np.abs(residual.device["kernel"]).max() > 1  # of opposite signs


@pytest.mark.long
def test_warm_start_finds_the_leading_directions() -> None:
    """With the same gradient each time and no error feedback, the result nears the best one."""
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
        found, residual = run(powersgd(error_feedback=False, **options), [grads] * 40)
        distances.append(np.abs(found[-1]["kernel"][0] - best).max())
        assert residual.device == ()
    warm, fresh, alternate, many = distances
    assert max(warm, many) < 1e-4 and alternate < 1e-2 < 0.1 < fresh  # half as many iterations


@pytest.mark.long
def test_stacked_layers_are_matrices_of_their_own() -> None:
    updates = gradients(3, layers=(5, 12, 20))
    found, _ = run(powersgd(stacked=("layers",)), updates)
    for layer in range(5):
        alone, _ = run(powersgd(), [{"layers": g["layers"][:, layer]} for g in updates])
        # Other random numbers, so that only the rank is the same.
        for sums in (found[2]["layers"][0, layer], alone[2]["layers"][0]):
            assert np.linalg.matrix_rank(sums, tol=1e-4) == 2


@pytest.mark.long
@pytest.mark.parametrize("alternate", [False, True])
def test_a_gradient_that_was_zero_is_sent_when_it_comes(alternate) -> None:
    updates = gradients(4, kernel=(12, 20))
    for grads in updates[:2]:
        grads["kernel"] *= 0
    found, residual = run(powersgd(alternate=alternate), updates)
    assert not found[1]["kernel"].any()
    assert np.linalg.norm(found[2]["kernel"][0]) > 0.2 * np.linalg.norm(total(updates[2])["kernel"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(residual))


def test_everything_is_whole_before_the_start() -> None:
    exchange = powersgd(start=3, alternate=True)
    assert exchange.at(0) == exchange.at(2) and hash(exchange.at(0)) == hash(exchange.at(2))
    assert len({exchange.at(step) for step in range(10)}) == 3
    assert len({powersgd(start=3).at(step) for step in range(10)}) == 2
    updates = gradients(4, kernel=(12, 20))
    found, _ = run(exchange, updates)
    for step in range(3):
        np.testing.assert_allclose(
            found[step]["kernel"][0], total(updates[step])["kernel"], rtol=1e-5, atol=1e-5
        )
    assert np.linalg.matrix_rank(found[3]["kernel"][0], tol=1e-4) == 2


def test_matrices_that_are_too_small_are_whole() -> None:
    updates = gradients(1, narrow=(50, 2), small=(6, 6), kernel=(12, 20))
    exchange = powersgd()
    assert [m.path for m in exchange.matrices(updates[0])] == ["kernel", "narrow", "small"]
    shapes = {name: jnp.zeros(leaf.shape[1:]) for name, leaf in updates[0].items()}
    assert [m.path for m in exchange.matrices(shapes)] == ["kernel", "small"]
    assert [m.path for m in dataclasses.replace(exchange, rank=3).matrices(shapes)] == ["kernel"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 0}, "rank is 0, but it must be a whole number of at least 1"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"start": -1}, "start is -1"),
        ({"iterations": 0}, "iterations is 0"),
        ({"min_saving": -1.0}, "min_saving is -1.0"),
        ({"alternate": True, "warm_start": False}, "alternate is True"),
        ({"stacked": ("(",)}, "stacked is"),
        ({"stacked": "layers"}, "stacked is 'layers'"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        powersgd(**options)


@pytest.mark.parametrize(
    "options, shape, message",
    [
        (
            {"rank": 10},
            (8, 9),
            "rank is 10, at which factors save too little in every matrix: the "
            "largest is a with 8 x 9",
        ),
        ({}, (9,), "rank is 2, but the model has no matrix"),
        ({"stacked": ("layers",)}, (20, 30), "'layers', which matches no parameter; they are: a"),
    ],
)
def test_parameters_that_do_not_fit(options, shape, message) -> None:
    with pytest.raises(ValueError, match=message):
        powersgd(**options).init({"a": jax.ShapeDtypeStruct(shape, jnp.float32)})


@pytest.mark.long
@pytest.mark.parametrize("alternate", [False, True])
def test_only_factors_and_vectors_are_on_the_wire(alternate) -> None:
    shapes = {"a": (512, 1024), "b": (3, 3, 64, 256), "c": (600, 500), "bias": (1000,)}
    matrices = [(512, 1024), (576, 256), (600, 500)]
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    exchange = PowerSGD(("data",), 8, rank=4, alternate=alternate).at(0)
    residual = jax.eval_shape(exchange.init, params)
    mesh = make_mesh(tiny.digits().mesh)
    one = PartitionSpec()
    mapped = jax.shard_map(
        exchange.reduce, mesh=mesh, in_specs=(one, one), out_specs=(one, one), check_vma=False
    )
    compiled = jax.jit(mapped).lower(params, residual).compile()
    sides = sum(m if alternate else n + m for n, m in matrices)
    least = 2 * 7 / 8 * 4 * (4 * sides + 1000)
    sent = wire_bytes(compiled)
    assert sent.keys() == {"f32"} and least <= sent["f32"] <= 1.05 * least
    found = traffic.collectives(compiled.as_text())
    assert sum(one.count for one in found) == (1 if alternate else 2)


def test_a_reset_keeps_the_factors() -> None:
    """Zeroed factors would make the next sums, and with them all later ones, exactly 0."""
    for alternate in (False, True):
        exchange = PowerSGD(over.AXES, 8, rank=1, alternate=alternate)
        every = over.gradients({"kernel": (12, 10)}, 2)
        _, residuals = over.run(exchange, every[:1])
        found = exchange.reset(residuals[0])
        assert np.any(residuals[0].device["kernel"]) and not np.any(found.device["kernel"])
        assert found.whole is residuals[0].whole
        (sums,), _ = over.run(exchange, every[1:], found)
        assert np.linalg.norm(sums["kernel"]) > 0.1
