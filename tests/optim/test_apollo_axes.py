"""Tests APOLLO on matrices with several axes, and on matrices that are split over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu.optim import factory, sharding
from lamb_tpu.optim.apollo import apollo
from tests.marks import some
from tests.optim.test_apollo import MINI, module, normal, numpy_loop, steps


@pytest.mark.parametrize("arguments", some([{"rank": 2}, MINI], ({"rank": 2},)))
@pytest.mark.parametrize(
    "shape, sides",
    [
        ((3, 2, 4, 5), ((0, 1, 2), (3,))),  # a convolution's kernel
        ((12, 3, 4), ((0,), (1, 2))),  # attention: projection into heads
        ((3, 4, 20), ((0, 1), (2,))),  # attention: projection out of heads
        ((6, 5), ((1,), (0,))),
        ((2, 20, 3), ((2, 0), (1,))),
    ],
)
def test_rows_and_columns_of_several_axes_are_a_matrix(shape, sides, arguments, monkeypatch):
    """The steps equal those of the flattened matrix, if the projection is flattened in the same way."""
    rng = np.random.default_rng(3)
    weights, *grads = (jnp.asarray(rng.standard_normal(shape)) for _ in range(4))
    lengths = [int(np.prod([shape[axis] for axis in side])) for side in sides]
    short = sides[int(lengths[1] < lengths[0])]
    drawn = rng.standard_normal((min(lengths), arguments["rank"]))

    def as_matrix(array):
        return jnp.transpose(array, (*sides[0], *sides[1])).reshape(lengths)

    def leaf_projection(key, leaf_shape, dtype):
        # The optimizer may sort the axes of a side in another order than the rule.
        rank = leaf_shape[-1]
        order = sorted(short, key=lambda axis: shape[axis] != rank)
        value = drawn.reshape(*(shape[axis] for axis in short), rank)
        return jnp.asarray(
            value.transpose(*(short.index(axis) for axis in order), len(short)), dtype
        )

    rules = [("", {"matrix_axes": sides})]
    monkeypatch.setattr(module, "projection", leaf_projection)
    path, state = steps(apollo(0.1, weight_decay=0.1, rules=rules, **arguments), weights, grads)
    monkeypatch.setattr(module, "projection", lambda *_: jnp.asarray(drawn, jnp.float32))
    expected, matrix_state = steps(
        apollo(0.1, weight_decay=0.1, **arguments), as_matrix(weights), list(map(as_matrix, grads))
    )
    for actual, wanted in zip(path, expected, strict=True):
        np.testing.assert_allclose(as_matrix(actual), wanted, rtol=0, atol=3e-6)
    assert state.mu.size == matrix_state.mu.size and state.mu.ndim == len(shape)


def test_no_matrix_takes_adamw():
    weights, grads = normal((4, 7), 3)
    rules = [("table", {"matrix_axes": ()}), ("", {})]
    params = {"table": jnp.asarray(weights), "kernel": jnp.asarray(weights)}
    path, state = steps(
        apollo(0.01, rank=2, rules=rules),
        params,
        [{"table": jnp.asarray(g), "kernel": jnp.asarray(g)} for g in grads],
    )
    expected = numpy_loop(weights, grads, lambda _: None)
    np.testing.assert_allclose(path[-1]["table"], expected[-1], rtol=0, atol=2e-6)
    assert state.mu["table"].shape == (4, 7) and state.mu["kernel"].shape == (2, 7)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{"rank": 2}, MINI])
@pytest.mark.parametrize(
    "shape, spec, metadata",
    [
        ((16, 24), PartitionSpec("x"), {}),  # the projected side
        ((16, 24), PartitionSpec(None, "x"), {}),
        ((24, 8), PartitionSpec("x"), {}),
        ((8, 5, 6), PartitionSpec("x"), {"layer_axes": (0,)}),
        ((3, 8, 2, 5), PartitionSpec(None, "x"), {"matrix_axes": ((0, 1, 2), (3,))}),
        ((3, 1, 2, 48), PartitionSpec(None, None, None, "x"), {"matrix_axes": ((0, 1, 2), (3,))}),
    ],
)
def test_shards_inside_shard_map_equal_the_full_matrix(shape, spec, metadata, arguments):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    weights, grads = normal(shape, 4)
    params, grads = jnp.float32(weights), [jnp.float32(g) for g in grads]
    arguments = {"update_gap": 2, "weight_decay": 0.1, "rules": [("", metadata)], **arguments}
    expected, full = steps(apollo(0.1, **arguments), params, grads)

    tx = apollo(0.1, axis_name=spec, **arguments)
    specs = sharding.state_sharding(tx, params, spec)

    def train(params, grads):
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    actual, state = jax.jit(
        jax.shard_map(  # check_vma verifies that outputs are replicated
            train, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, specs)
        )
    )(params, grads)
    np.testing.assert_allclose(actual, expected[-1], rtol=0, atol=3e-6)
    for name in ("mu", "nu", "norms"):
        np.testing.assert_allclose(getattr(state, name), getattr(full, name), rtol=2e-5, atol=2e-6)
    assert state.mu.addressable_shards[0].data.size in (full.mu.size // 8, full.mu.size)


def test_a_rank_equal_to_the_split_axis_is_rejected():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spec, params = PartitionSpec(None, "x"), jnp.ones((8, 8, 70))
    tx = apollo(0.1, rank=8, axis_name=spec, rules=[("", {"matrix_axes": ((0, 1), (2,))})])
    with pytest.raises(
        ValueError, match="rank=8 must differ from the length of the axis along which"
    ):
        jax.shard_map(
            lambda p: tx.update(p, tx.init(p), p)[0], mesh=mesh, in_specs=spec, out_specs=spec
        )(params)


def test_split_matrices_without_a_spec_are_rejected():
    # A shard may be too narrow to be projected although the full matrix is wide enough. Without a
    # spec the full shape is unknown, so every split matrix is rejected.
    rules = [("left", {"adapt": False}), ("layers", {"layer_axes": (0,)}), ("", {})]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("x")

    def update(params, axis_name):
        config = {"name": "apollo", "rank": 4, "rules": rules, "axis_name": axis_name}
        tx = factory.make_optimizer(config, 0.1)
        return jax.jit(
            jax.shard_map(
                lambda p: tx.update(p, tx.init(p), p)[0], mesh=mesh, in_specs=split, out_specs=split
            )
        )(params)

    others = {"left": jnp.ones((16, 16)), "layers": jnp.ones((8, 16)), "bias": jnp.ones(16)}
    updates = update(others | {"w": {}}, "x")  # elementwise, so full leaves are not needed
    np.testing.assert_allclose(updates["bias"], -0.1, rtol=1e-4)
    for shape in ((16, 16), (64, 8)):
        with pytest.raises(
            ValueError, match=("axis_name='x' must be a PartitionSpec for the matrix 'w'")
        ):
            update(others | {"w": jnp.ones(shape)}, lambda path: "x")
