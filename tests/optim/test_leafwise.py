"""Tests the loop over leaves that all optimizers share, with a toy optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.optim import leafwise, trust_ratio
from lamb_tpu.optim.leafwise import one_minus_power


class SumState(NamedTuple):
    count: jax.Array
    total: Any
    diagnostics: Any


def sums(learning_rate=1.0, rules="all", seen=None, **options):
    """Steps along the sum of all gradients; `seen` receives the input of each step.

    The optimizer reports the norm of the weights as its trust ratio, which has no effect.
    """

    def init_leaf(param, metadata, axes):
        return (leafwise.zeros_like(param),)

    def step_leaf(leaf, total):
        if seen is not None:
            seen.append(leaf)
        total = total + leaf.grad
        return -leaf.rate * total, (total,), trust_ratio.leaf_norm(leaf.weights, leaf.metadata)

    return leafwise.transform(SumState, init_leaf, step_leaf, learning_rate, rules, **options)


def test_schedules_get_the_number_of_completed_updates():
    tx, params = sums(lambda count: 10.0 * count + 1.0), {"w": jnp.zeros(2)}
    state = tx.init(params)
    for expected in (-1.0, -22.0, -63.0):  # 1 * 1, 11 * 2, 21 * 3
        updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        np.testing.assert_array_equal(updates["w"], expected)
    assert state.count == 3 and state.diagnostics is None


@pytest.mark.parametrize(
    "dtype, inner",
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_a_step_sees_wide_dtypes_and_updates_are_narrow_again(dtype, inner):
    with jax.enable_x64(dtype == "float64"):
        seen = []
        tx, params = sums(seen=seen), {"w": jnp.ones(2, dtype)}
        updates, state = tx.update(params, tx.init(params), params)
        assert {x.dtype.name for x in (seen[0].grad, seen[0].weights, seen[0].rate)} == {inner}
        assert state.total["w"].dtype.name == inner
        assert updates["w"].dtype.name == dtype


def test_input_of_a_step():
    seen = []
    tx = sums(
        0.5,
        [("^a", {"decay": False}), ("", {"layer_axes": (0,)})],
        seen=seen,
        axis_name=lambda path: {"a": None, "b/kernel": ("x", "y")}[path],
    )
    params = {"b": {"kernel": jnp.ones((2, 1))}, "a": jnp.zeros(3)}
    state = tx.init(params)._replace(count=jnp.int32(6))
    tx.update(params, state, params)
    assert [leaf.index for leaf in seen] == [0, 1]
    assert [leaf.metadata.decay for leaf in seen] == [False, True]
    assert [leaf.metadata.layer_axes for leaf in seen] == [(), (0,)]
    assert [(int(leaf.completed), int(leaf.count)) for leaf in seen] == [(6, 7)] * 2
    assert all(leaf.rate == 0.5 for leaf in seen)
    assert [(leaf.path, leaf.axis_name) for leaf in seen] == [("a", None), ("b/kernel", ("x", "y"))]
    np.testing.assert_array_equal(seen[1].weights, np.ones((2, 1)))


def test_the_count_stays_where_it_would_overflow():
    tx, params = sums(), {"w": jnp.zeros(())}
    largest = np.iinfo(np.int32).max
    state = tx.init(params)._replace(count=jnp.int32(largest))
    assert tx.update(params, state, params)[1].count == largest


def test_gradients_are_clipped_together_before_the_step():
    tx = sums(clip_global_norm=1.0)
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(state.total["b"], 0.8, rtol=1e-6)


def test_diagnostics():
    rules = [("stack", {"layer_axes": (0,)}), ("", {})]
    tx = sums(0.5, rules, collect=True)
    params = {"stack": jnp.array([[3.0, 4.0], [0.0, 2.0]]), "w": jnp.array([6.0, 8.0])}
    grads = {"stack": jnp.array([[6.0, 8.0], [0.0, 0.0]]), "w": jnp.array([0.0, 4.0])}
    state = tx.init(params)
    np.testing.assert_array_equal(state.diagnostics.ratios["stack"], [1.0, 1.0])
    np.testing.assert_array_equal(state.diagnostics.update_norms["stack"], [0.0, 0.0])
    assert state.diagnostics.weight_norms["w"] == 0.0

    _, state = jax.jit(tx.update)(grads, state, params)
    diagnostics = state.diagnostics
    np.testing.assert_array_equal(diagnostics.ratios["stack"], [5.0, 2.0])
    assert diagnostics.ratios["w"] == 10.0
    np.testing.assert_allclose(diagnostics.update_norms["stack"], [5.0, 0.0])
    np.testing.assert_allclose(diagnostics.update_norms["w"], 2.0)
    np.testing.assert_allclose(diagnostics.weight_norms["stack"], [5.0, 2.0])
    np.testing.assert_allclose(diagnostics.weight_norms["w"], 10.0)
    assert {leaf.dtype for leaf in jax.tree.leaves(diagnostics)} == {jnp.dtype("float32")}

    tx = leafwise.transform(  # without a ratio
        SumState,
        lambda param, metadata, axes: (leafwise.zeros_like(param),),
        lambda leaf, total: (-leaf.rate * leaf.grad, (total,), None),
        0.5,
        rules,
        collect=True,
    )
    _, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(state.diagnostics.ratios["stack"], [1.0, 1.0])


@pytest.mark.parametrize("collect", [False, True])
def test_the_state_keeps_its_structure(collect):
    tx = sums(rules=[("^s$", {"layer_axes": (0, 1)}), ("", {})], collect=collect)
    params = {"s": jnp.ones((2, 3, 1)), "scalar": jnp.ones((), jnp.bfloat16), "t": jnp.ones(2)}
    state = tx.init(params)
    new = tx.update(params, state, params)[1]
    assert jax.tree.structure(state) == jax.tree.structure(new)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_a_tree_without_leaves():
    tx = sums(collect=True, clip_global_norm=1.0)
    updates, state = tx.update({}, tx.init({}), {})
    assert updates == {} and state.count == 1 and state.diagnostics.ratios == {}


@pytest.mark.parametrize("base", [0.0, 0.9, 0.999, 0.999999])
def test_one_minus_power_does_not_cancel(base):
    for count in (1, 2, 1000, 10**7):
        exact = -np.expm1(count * np.log(base or 1e-300))
        for given in (base, jnp.float32(base)):
            # The float32 value nearest to 0.999999 is another base, with another exact result.
            exact_here = (
                exact
                if isinstance(given, float)
                else -np.expm1(count * np.log(np.float64(given) or 1e-300))
            )
            value = float(one_minus_power(given, jnp.int32(count), jnp.float32))
            assert abs(value - exact_here) <= 3e-6 * exact_here
        value = float(one_minus_power(base, jnp.int32(count), jnp.float32))
        assert abs(value - exact) <= 3e-7 * exact
