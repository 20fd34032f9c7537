"""APOLLO against a loop in NumPy, and what follows from its definition."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu.optim import factory, sharding
from lamb_tpu.optim.apollo import apollo
from lamb_tpu.optim.presets import preset
from tests.marks import some

module = importlib.import_module("lamb_tpu.optim.apollo")
MINI = {"rank": 1, "scaling": "tensor", "scale": 128.0}


def _gaussian(seed, index, refreshed, short, rank):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), refreshed)
    return np.asarray(jax.random.normal(key, (short, rank), jnp.float64)) / np.sqrt(rank)


def _loop(
    weights,
    grads,
    draw,
    *,
    rate=0.01,
    rank=2,
    scale=1.0,
    scaling="channel",
    gap=200,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    decay=0.0,
    limit=1.01,
    front=False,
):
    """The weights after each update of one matrix; draw(t) is P, None for AdamW."""
    transposed = weights.ndim == 2 and weights.shape[0] > weights.shape[1]
    weights = (weights.T if transposed else weights).copy()
    m = v = 0.0
    before, path = None, []
    for t, grad in enumerate(grads, start=1):
        grad = grad.T if transposed else grad
        matrix = draw((t - 1) // gap)
        low = grad if matrix is None else matrix.T @ grad
        m = b1 * m + (1 - b1) * low
        v = b2 * v + (1 - b2) * low**2
        step = m / (np.sqrt(v) + eps)
        if matrix is not None:
            if scaling == "channel":
                s = np.array(
                    [
                        np.linalg.norm(step[:, j]) / (np.linalg.norm(low[:, j]) + 1e-8)
                        for j in range(low.shape[1])
                    ]
                )
            else:
                s = np.linalg.norm(step) / (np.linalg.norm(low) + 1e-8)
            step = grad * s
            if front:
                step = step * np.sqrt(scale)
            size = np.linalg.norm(step)
            if limit is not None and before:
                factor = max(size / (before + 1e-8), limit) / limit
                step, size = step / factor, size / factor
            before = size
            if not front:
                step = step * np.sqrt(scale)
        weights = weights - rate * np.sqrt(1 - b2**t) / (1 - b1**t) * step
        weights = weights - rate * decay * weights
        path.append(weights.T if transposed else weights)
    return path


def _run(tx, params, sequence):
    update, state, path = jax.jit(tx.update), tx.init(params), []
    for grads in sequence:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    assert update._cache_size() == 1
    return path, state


def _normal(shape, num_steps, seed=0):
    """Weights, and gradients of which the sizes jump about so that growth is limited."""
    rng = np.random.default_rng(seed)
    grads = [rng.standard_normal(shape) * (0.2 + t % 4) for t in range(num_steps)]
    return rng.standard_normal(shape), grads


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": 0.1, "gap": 2},
        {"rank": 1, "scaling": "tensor", "scale": 128.0, "decay": 0.1},
        {"rank": 1, "scaling": "tensor", "scale": 128.0, "front": True, "gap": 1},
        {"limit": None, "b1": 0.5, "b2": 0.9, "eps": 0.1, "scale": 3.0},
        {"limit": 1.5, "rate": 0.3},
    ],
)
@pytest.mark.parametrize("dtype", some(["float32", "float64"], ("float32",)))
def test_equals_a_loop_in_numpy(options, dtype, monkeypatch):
    names = {
        "decay": "weight_decay",
        "gap": "update_gap",
        "limit": "growth_limit",
        "front": "scale_front",
    }
    arguments = {"rank": 2} | {names.get(k, k): v for k, v in options.items() if k != "rate"}
    rank = arguments["rank"]
    shapes = {
        "bias": (5,),
        "flat": (4, 7),
        "small": (rank, 6),
        "square": (4, 4),
        "tall": (9, 4),
        "temperature": (),
    }
    data = {name: _normal(shape, 6, seed) for seed, (name, shape) in enumerate(shapes.items())}
    with jax.enable_x64(True):
        draws = {"flat": 1, "square": 3, "tall": 4}  # the place among the sorted names
        expected = {
            name: _loop(
                weights,
                grads,
                (
                    lambda k, name=name: (
                        _gaussian(7, draws[name], k, 4, rank) if name in draws else None
                    )
                ),
                **options,
            )
            for name, (weights, grads) in data.items()
        }
        drawn = module.projection  # in float64 here: in float32 other numbers are drawn
        monkeypatch.setattr(
            module,
            "projection",
            lambda key, shape, dtype: drawn(key, shape, jnp.float64).astype(dtype),
        )
        path, _ = _run(
            apollo(options.get("rate", 0.01), seed=7, **arguments),
            {name: jnp.asarray(weights, dtype) for name, (weights, _) in data.items()},
            [
                {name: jnp.asarray(grads[t], dtype) for name, (_, grads) in data.items()}
                for t in range(6)
            ],
        )
    tolerance = {"float32": 5e-6, "float64": 1e-13}[dtype]
    for t in range(6):
        for name in shapes:
            np.testing.assert_allclose(path[t][name], expected[name][t], rtol=0, atol=tolerance)


def test_leaves_that_the_rules_leave_out_take_adamw():
    weights, grads = _normal((4, 7), 3)
    rules = [("embedding", {"adapt": False, "decay": False}), ("", {})]
    params = {"embedding": jnp.asarray(weights), "kernel": jnp.asarray(weights)}
    path, state = _run(
        apollo(0.01, rank=2, weight_decay=0.1, rules=rules),
        params,
        [{"embedding": jnp.asarray(g), "kernel": jnp.asarray(g)} for g in grads],
    )
    expected = _loop(weights, grads, lambda _: None)
    np.testing.assert_allclose(path[-1]["embedding"], expected[-1], rtol=0, atol=2e-6)
    assert state.mu["embedding"].shape == (4, 7) and state.mu["kernel"].shape == (2, 7)


@pytest.mark.parametrize("shape", [(32, 64), (64, 32)])
def test_state_is_two_moments_of_the_projection(shape):
    state = apollo(0.1, rank=4).init({"kernel": jnp.zeros(shape, jnp.bfloat16)})
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert num_bytes == 4 * (2 * 4 * 64) + 4 + 4  # float32 moments; the last norm; the count
    mini = apollo(0.1, **preset("apollo", "apollo_mini")).init({"kernel": jnp.zeros(shape)})
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(mini)) == 4 * (2 * 64) + 4 + 4


def test_channels_are_lengthened_as_adam_would_where_nothing_is_projected_away(monkeypatch):
    # The last row of every gradient is 0, so that the first 5 of 6 rows are all there is.
    monkeypatch.setattr(module, "projection", lambda _, shape, dtype: jnp.eye(*shape, dtype=dtype))
    weights, grads = _normal((6, 9), 4)
    with jax.enable_x64(True):
        params = jnp.asarray(weights)
        tx, adam = apollo(0.1, rank=5, growth_limit=None, eps=1e-30), optax.adam(0.1, eps=1e-30)
        state, adam_state = tx.init(params), adam.init(params)
        for grad in grads:
            grad = jnp.asarray(grad).at[-1].set(0.0)
            update, state = tx.update(grad, state, params)
            expected, adam_state = adam.update(grad, adam_state)
            norms = np.linalg.norm(update, axis=0)
            np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=0), rtol=1e-7)
            np.testing.assert_allclose(
                update / norms, -grad / np.linalg.norm(grad, axis=0), rtol=0, atol=1e-12
            )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("arguments", [{"rank": 2}, MINI])
def test_stacked_layers_equal_separate_ones(axis, arguments, monkeypatch):
    layers = [_normal((5, 8), 4, seed) for seed in range(3)]
    rng = np.random.default_rng(9)
    matrices = jnp.asarray(rng.standard_normal((3, 5, arguments["rank"])), jnp.float32)

    def stack(arrays):
        return jnp.stack([jnp.asarray(a, jnp.float32) for a in arrays], axis)

    monkeypatch.setattr(module, "projection", lambda *_: matrices)
    tx = apollo(0.1, weight_decay=0.1, rules=[("", {"layer_axes": (axis,)})], **arguments)
    path, _ = _run(
        tx, stack([w for w, _ in layers]), [stack([g[t] for _, g in layers]) for t in range(4)]
    )
    for index, (weights, grads) in enumerate(layers):
        monkeypatch.setattr(module, "projection", lambda *_, index=index: matrices[index])
        alone, _ = _run(
            apollo(0.1, weight_decay=0.1, **arguments),
            jnp.asarray(weights, jnp.float32),
            [jnp.asarray(g, jnp.float32) for g in grads],
        )
        for stacked, separate in zip(path, alone, strict=True):
            np.testing.assert_allclose(jnp.take(stacked, index, axis), separate, rtol=0, atol=1e-6)


def test_stacked_layers_have_projections_of_their_own():
    matrix = jnp.broadcast_to(jnp.arange(12.0).reshape(3, 4), (2, 3, 4))
    tx = apollo(0.1, rank=1, rules=[("", {"layer_axes": (0,)})])
    _, state = tx.update(matrix, tx.init(matrix), matrix)
    assert state.mu.shape == (2, 1, 4) and state.norms.shape == (2, 1, 1)
    assert np.abs(state.mu[0] - state.mu[1]).min() > 1e-3


def test_norms_grow_by_the_limit_at_most():
    params = jnp.ones((3, 5))
    tx = apollo(1.0, rank=1, b2=0.0, growth_limit=1.01)
    state, norms = tx.init(params), []
    for size in (1.0, 1e-4, 1e-4):  # the first moment outlives the small gradients
        _, state = tx.update(size * jnp.ones((3, 5)), state, params)
        norms.append(float(state.norms[0, 0]))
    np.testing.assert_allclose([norms[1] / norms[0], norms[2] / norms[1]], 1.01, rtol=1e-6)


def test_a_matrix_that_starts_with_a_zero_gradient_moves_on():
    params, grad = jnp.ones((3, 5)), jnp.ones((3, 5))
    tx = apollo(0.1, rank=1)
    updates, state = tx.update(jnp.zeros((3, 5)), tx.init(params), params)
    np.testing.assert_array_equal(updates, 0.0)
    updates, state = tx.update(grad, state, params)
    assert np.linalg.norm(updates) > 0.1


@pytest.mark.parametrize("arguments", [{"rank": 2}, MINI])
def test_moments_are_kept_when_the_projection_changes(arguments):
    weights, grads = _normal((4, 6), 1)
    grad = jnp.asarray(grads[0], jnp.float32)
    tx = apollo(0.1, update_gap=2, **arguments)
    state, mus = tx.init(grad), []
    for _ in range(4):
        _, state = tx.update(grad, state, grad)
        mus.append(np.asarray(state.mu))
    added = [mu - 0.9 * before for mu, before in zip(mus, [0.0, *mus])]  # 0.1 P'G
    np.testing.assert_allclose(added[1], added[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(added[3], added[2], rtol=1e-4, atol=1e-6)
    assert np.abs(added[2] - added[1]).max() > 1e-2


@pytest.mark.parametrize("arguments", [{"rank": 4}, MINI])
def test_learns_least_squares(arguments):
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.standard_normal((256, 16)), jnp.float32)
    target = inputs @ jnp.asarray(rng.standard_normal((16, 32)), jnp.float32)
    schedule = optax.cosine_decay_schedule(0.05 if arguments["rank"] > 1 else 0.01, 300)
    tx = apollo(schedule, update_gap=50, **arguments)
    params = jnp.zeros((16, 32))

    def loss_fn(params):
        return jnp.mean((inputs @ params - target) ** 2)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
        return optax.apply_updates(params, updates), state

    first, state = float(loss_fn(params)), tx.init(params)
    for _ in range(300):
        params, state = step(params, state)
    assert float(loss_fn(params)) < 1e-3 * first


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [PartitionSpec("x", None), PartitionSpec(None, "x")])
@pytest.mark.parametrize("arguments", some([{"rank": 2}, MINI], ({"rank": 2},)))
def test_sharded_equals_whole(axis_type, spec, arguments):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    weights, grads = _normal((16, 24), 3)
    whole, state = _run(
        apollo(0.1, update_gap=2, **arguments),
        jnp.asarray(weights, jnp.float32),
        [jnp.asarray(g, jnp.float32) for g in grads],
    )
    tx = apollo(0.1, update_gap=2, **arguments)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, spec)
        params = jax.device_put(jnp.asarray(weights, jnp.float32), split)
        shardings = sharding.state_sharding(tx, params, split)
        sharded_state = jax.jit(tx.init, out_shardings=shardings)(params)
        update = jax.jit(tx.update, out_shardings=(split, shardings))
        for t, grad in enumerate(grads):
            grad = jax.device_put(jnp.asarray(grad, jnp.float32), split)
            types = jax.tree.map(jax.typeof, sharded_state)
            updates, sharded_state = update(grad, sharded_state, params)
            params = optax.apply_updates(params, updates)
            assert jax.tree.map(jax.typeof, sharded_state) == types
            np.testing.assert_allclose(params, whole[t], rtol=0, atol=2e-6)
        assert update._cache_size() == 1
    np.testing.assert_allclose(sharded_state.mu, state.mu, rtol=0, atol=2e-6)


def test_replicas_inside_shard_map_move_alike():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    weights, grads = _normal((4, 6), 8)
    params, grads = jnp.asarray(weights), jnp.asarray(np.stack(grads))
    tx = apollo(0.1, rank=2)

    def body(params, grads):
        return tx.update(jax.lax.pmean(grads[0], "x"), tx.init(params), params)[0]

    whole, _ = tx.update(jnp.mean(grads, 0), tx.init(params), params)
    inside = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("x")),
            out_specs=PartitionSpec(),
        )
    )(params, grads)
    np.testing.assert_allclose(inside, whole, rtol=0, atol=1e-6)


def test_narrow_parameters_have_wide_state():
    params = {"kernel": jnp.ones((4, 6), jnp.bfloat16), "bias": jnp.ones(6, jnp.bfloat16)}
    tx = apollo(0.1, rank=2, collect=True)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    assert state.readings.ratios["kernel"] == 1.0
    np.testing.assert_allclose(
        state.readings.update_norms["kernel"],
        np.linalg.norm(np.float32(updates["kernel"])),
        rtol=1e-2,
    )


def test_inject_hyperparams():
    weights, grads = _normal((4, 6), 3)
    params, grads = jnp.asarray(weights, jnp.float32), [jnp.asarray(g, jnp.float32) for g in grads]
    injected = optax.inject_hyperparams(apollo, static_args="rank")(0.1, rank=2, update_gap=2)
    expected, _ = _run(apollo(0.1, rank=2, update_gap=2), params, grads)
    path, _ = _run(injected, params, grads)
    np.testing.assert_allclose(path[-1], expected[-1], rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match=r"rank must not be an array.*static_args=\('rank',\)"):
        optax.inject_hyperparams(apollo)(0.1, rank=2).init(params)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, not 0"),
        ({"rank": 2.0}, "rank must be a whole number of at least 1, not 2.0"),
        ({"scaling": "row"}, "scaling must be one of channel, tensor, not 'row'"),
        ({"scale": -1.0}, "scale must be at least 0, not -1.0"),
        ({"update_gap": 0}, "update_gap must be a whole number of at least 1, not 0"),
        ({"b1": 1.0}, "b1 must be at least 0 and below 1, not 1.0"),
        ({"b2": -0.1}, "b2 must be at least 0 and below 1, not -0.1"),
        ({"eps": -1e-6}, "eps must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, not -0.1"),
        ({"growth_limit": 0.9}, "growth_limit must be at least 1, or None, not 0.9"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, not -1.0"),
        ({"rules": "none"}, "rules 'none' are unknown"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        apollo(**{"learning_rate": 0.1, **arguments})


def test_from_a_config():
    for name, rank in (("apollo", 256), ("apollo_mini", 1)):
        config = {"name": "apollo", **preset("apollo", name)}
        state = factory.make_optimizer(config, 0.1).init(jnp.zeros((300, 400)))
        assert state.mu.shape == (rank, 400)


@pytest.mark.parametrize("arguments", some([{"rank": 2}, MINI], ({"rank": 2},)))
@pytest.mark.parametrize(
    "shape, sides",
    [
        ((3, 2, 4, 5), ((0, 1, 2), (3,))),  # a convolution's kernel
        ((12, 3, 4), ((0,), (1, 2))),
        ((3, 4, 20), ((0, 1), (2,))),  # of attention: into heads, and out
        ((6, 5), ((1,), (0,))),
        ((2, 20, 3), ((2, 0), (1,))),
    ],
)
def test_rows_and_columns_of_several_axes_are_a_matrix(shape, sides, arguments, monkeypatch):
    """Steps are those of the matrix that the axes make, its projection shaped likewise."""
    rng = np.random.default_rng(3)
    weights, *grads = (jnp.asarray(rng.standard_normal(shape)) for _ in range(4))
    lengths = [int(np.prod([shape[axis] for axis in side])) for side in sides]
    short = sides[int(lengths[1] < lengths[0])]
    drawn = rng.standard_normal((min(lengths), arguments["rank"]))

    def as_matrix(array):
        return jnp.transpose(array, (*sides[0], *sides[1])).reshape(lengths)

    def leaf_projection(key, leaf_shape, dtype):
        # The optimizer may take the axes of the side in another order than the rule has them.
        rank = leaf_shape[-1]
        order = sorted(short, key=lambda axis: shape[axis] != rank)
        value = drawn.reshape(*(shape[axis] for axis in short), rank)
        return jnp.asarray(
            value.transpose(*(short.index(axis) for axis in order), len(short)), dtype
        )

    rules = [("", {"matrix_axes": sides})]
    monkeypatch.setattr(module, "projection", leaf_projection)
    path, state = _run(apollo(0.1, weight_decay=0.1, rules=rules, **arguments), weights, grads)
    monkeypatch.setattr(module, "projection", lambda *_: jnp.asarray(drawn, jnp.float32))
    expected, matrix_state = _run(
        apollo(0.1, weight_decay=0.1, **arguments), as_matrix(weights), list(map(as_matrix, grads))
    )
    for found, wanted in zip(path, expected, strict=True):
        np.testing.assert_allclose(as_matrix(found), wanted, rtol=0, atol=3e-6)
    assert state.mu.size == matrix_state.mu.size and state.mu.ndim == len(shape)


def test_no_matrix_takes_adamw():
    weights, grads = _normal((4, 7), 3)
    rules = [("table", {"matrix_axes": ()}), ("", {})]
    params = {"table": jnp.asarray(weights), "kernel": jnp.asarray(weights)}
    path, state = _run(
        apollo(0.01, rank=2, rules=rules),
        params,
        [{"table": jnp.asarray(g), "kernel": jnp.asarray(g)} for g in grads],
    )
    expected = _loop(weights, grads, lambda _: None)
    np.testing.assert_allclose(path[-1]["table"], expected[-1], rtol=0, atol=2e-6)
    assert state.mu["table"].shape == (4, 7) and state.mu["kernel"].shape == (2, 7)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{"rank": 2}, MINI])
@pytest.mark.parametrize(
    "shape, spec, facts",
    [
        ((16, 24), PartitionSpec("x"), {}),  # the side that is projected
        ((16, 24), PartitionSpec(None, "x"), {}),
        ((24, 8), PartitionSpec("x"), {}),
        ((8, 5, 6), PartitionSpec("x"), {"layer_axes": (0,)}),
        ((3, 8, 2, 5), PartitionSpec(None, "x"), {"matrix_axes": ((0, 1, 2), (3,))}),
        ((3, 1, 2, 48), PartitionSpec(None, None, None, "x"), {"matrix_axes": ((0, 1, 2), (3,))}),
    ],
)
def test_parts_inside_shard_map_equal_the_whole(shape, spec, facts, arguments):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    weights, grads = _normal(shape, 4)
    params, grads = jnp.float32(weights), [jnp.float32(g) for g in grads]
    arguments = {"update_gap": 2, "weight_decay": 0.1, "rules": [("", facts)], **arguments}
    expected, whole = _run(apollo(0.1, **arguments), params, grads)

    tx = apollo(0.1, axis_name=spec, **arguments)
    specs = sharding.state_sharding(tx, params, spec)

    def train(params, grads):
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    found, state = jax.jit(
        jax.shard_map(  # with check_vma: what is replicated is seen to be
            train, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, specs)
        )
    )(params, grads)
    np.testing.assert_allclose(found, expected[-1], rtol=0, atol=3e-6)
    for name in ("mu", "nu", "norms"):
        np.testing.assert_allclose(getattr(state, name), getattr(whole, name), rtol=2e-5, atol=2e-6)
    assert state.mu.addressable_shards[0].data.size in (whole.mu.size // 8, whole.mu.size)


def test_a_rank_that_hides_the_axis_that_is_split_is_refused():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spec, params = PartitionSpec(None, "x"), jnp.ones((8, 8, 70))
    tx = apollo(0.1, rank=8, axis_name=spec, rules=[("", {"matrix_axes": ((0, 1), (2,))})])
    with pytest.raises(ValueError, match="split along an axis as long as its rank 8: give another"):
        jax.shard_map(
            lambda p: tx.update(p, tx.init(p), p)[0], mesh=mesh, in_specs=spec, out_specs=spec
        )(params)


def test_matrices_that_are_split_over_a_name_alone_are_refused():
    # A shard may be too narrow to be projected where the matrix is not, so every one is refused.
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
    updates = update(others | {"w": {}}, "x")  # elementwise, so nothing needs to be whole
    np.testing.assert_allclose(updates["bias"], -0.1, rtol=1e-4)
    for shape in ((16, 16), (64, 8)):
        with pytest.raises(
            ValueError,
            match=(
                "apollo must know along which axis the matrix 'w' is split: .*PartitionSpec .* not 'x'"
            ),
        ):
            update(others | {"w": jnp.ones(shape)}, lambda path: "x")
