"""Tests AGVM: the factors of modules, and the updates that measure and apply them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim

RULES = ["^body/", "^neck/", "^head/"]


def _tree(seed: int):
    rng = np.random.default_rng(seed)
    return {
        name: {"w": jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)}
        for name in ("body", "neck", "head")
    }


def _halves(seed: int, noise=(1.0, 3.0, 0.1)):
    mean, a, b = _tree(seed), _tree(seed + 100), _tree(seed + 200)
    scales = dict(zip(mean, noise, strict=True))
    return tuple(
        {name: {"w": mean[name]["w"] + scales[name] * part[name]["w"]} for name in mean}
        for part in (a, b)
    )


def _mean(halves):
    return jax.tree.map(lambda x, y: (x + y) / 2, *halves)


def _target(halves, bounds=(0.5, 10.0), eps=1e-6):
    distances = []
    for name in ("body", "neck", "head"):
        a, b = (np.ravel(half[name]["w"]).astype(np.float64) for half in halves)
        distances.append(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) + eps)
    return np.sqrt(np.clip(distances[0] / np.array(distances), *bounds))


def test_factors_are_measured_at_intervals_and_hold_in_between() -> None:
    params = _tree(0)
    tx = optim.agvm(optax.sgd(1.0), RULES, interval=2, start=2, stop=5, momentum=0.5)
    update, state, expected = jax.jit(tx.update), tx.init(params), np.ones(3)
    for step in range(8):
        halves = _halves(step)
        updates, state = update(_mean(halves), state, params, halves=halves)
        if step in (2, 4):
            expected = 0.5 * expected + 0.5 * _target(halves)
            np.testing.assert_allclose(state.targets, _target(halves), rtol=1e-5)
        np.testing.assert_allclose(state.factors, expected, rtol=1e-5)
        applied = expected if 2 <= step <= 5 else np.ones(3)
        for factor, name in zip(applied, params, strict=True):
            np.testing.assert_allclose(
                updates[name]["w"], -factor * _mean(halves)[name]["w"], rtol=1e-5
            )
    assert expected[0] == 1.0 and expected[1] < 0.95 and expected[2] > 1.5


def test_another_anchor() -> None:
    params, halves = _tree(0), _halves(0)
    tx = optim.agvm(
        optax.sgd(1.0), RULES, anchor=1, interval=1, start=0, momentum=0.0, bounds=(0.0, 100.0)
    )
    _, state = tx.update(_mean(halves), tx.init(params), params, halves=halves)
    first = _target(halves, (0.0, 100.0))
    np.testing.assert_allclose(state.factors, first / first[1], rtol=1e-4)


def test_without_halves_factors_stay() -> None:
    params, halves = _tree(0), _halves(0)
    tx = optim.agvm(optax.sgd(1.0), RULES, interval=1, start=0, momentum=0.5)
    _, state = tx.update(_mean(halves), tx.init(params), params, halves=halves)
    updates, after = tx.update(_mean(halves), state, params)
    np.testing.assert_array_equal(after.factors, state.factors)
    np.testing.assert_allclose(
        updates["neck"]["w"], -state.factors[1] * _mean(halves)["neck"]["w"], rtol=1e-6
    )
    assert int(after.count) == 2


def test_decoupled_decay_is_scaled_too() -> None:
    params, halves = _tree(0), _halves(0)
    none = jax.tree.map(jnp.zeros_like, params)
    tx = optim.agvm(optax.adamw(0.1, weight_decay=0.5), RULES, interval=1, start=0, momentum=0.0)
    updates, state = tx.update(none, tx.init(params), params, halves=halves)
    np.testing.assert_allclose(
        updates["head"]["w"], -0.05 * state.factors[2] * params["head"]["w"], rtol=1e-5
    )


def test_preconditioning_by_the_second_moments_before_the_update() -> None:
    params, b2 = _tree(0), 0.9
    tx = optim.agvm(
        optax.adam(0.1, b2=b2),
        RULES,
        interval=1,
        start=1,
        momentum=0.0,
        second_moment=lambda state: state[0].nu,
        b2=b2,
        eps_root=1e-8,
    )
    state = tx.init(params)
    for step in range(2):
        halves, moments = _halves(step), state.inner_state[0].nu
        _, state = tx.update(_mean(halves), state, params, halves=halves)
    divided = tuple(
        jax.tree.map(lambda h, v: h / (jnp.sqrt(b2 * v + (1 - b2) * h**2) + 1e-8), half, moments)
        for half in halves
    )
    np.testing.assert_allclose(state.targets, _target(divided), rtol=1e-5)
    assert not np.allclose(state.targets, _target(halves), rtol=1e-2)


def test_tensors_that_are_split() -> None:
    """Inside shard_map the factors equal those of full tensors on all devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params, halves = _tree(0), _halves(0)
    specs = {
        name: {"w": PartitionSpec("data") if name != "neck" else PartitionSpec()} for name in params
    }
    factors = {}
    for axis_name in (lambda path: None if "neck" in path else "data", None):
        tx = optim.agvm(
            optim.lamb(0.1, axis_name=axis_name),
            RULES,
            interval=1,
            start=0,
            momentum=0.0,
            axis_name=axis_name,
        )
        shapes = optim.state_sharding(tx, params, specs)

        def step(params, state, halves, tx=tx):
            return tx.update(_mean(halves), state, params, halves=halves)

        split = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(specs, shapes, (specs, specs)),
                out_specs=(specs, shapes),
                check_vma=False,
            )
        )
        updates, state = split(params, tx.init(params), halves)
        factors[axis_name is None] = np.asarray(state.factors)
        if axis_name is not None:
            full = optim.agvm(optim.lamb(0.1), RULES, interval=1, start=0, momentum=0.0)
            expected, _ = step(params, full.init(params), halves, full)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), updates, expected
            )
    np.testing.assert_allclose(factors[False], _target(halves), rtol=1e-5)
    assert not np.allclose(
        factors[True], factors[False], rtol=1e-2
    )  # without the psum the factors are wrong


def test_errors() -> None:
    with pytest.raises(ValueError, match="stop=9 must be a whole number of at least 10"):
        optim.agvm(optax.sgd(0.1), RULES, start=10, stop=9)
    with pytest.raises(ValueError, match="no module matches the parameter 'head/w'"):
        optim.agvm(optax.sgd(0.1), RULES[:2]).init(_tree(0))
    with pytest.raises(ValueError, match="anchor=3 must be below 3, the number of modules"):
        optim.agvm(optax.sgd(0.1), RULES, anchor=3)
    with pytest.raises(ValueError, match="momentum=1.0 must be at least 0 and below 1"):
        optim.agvm(optax.sgd(0.1), RULES, momentum=1.0)
