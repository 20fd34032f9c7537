"""Compares APOLLO with a NumPy loop, and tests consequences of its definition."""

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


def numpy_loop(
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
    """Returns the weights of one matrix after each update; draw(k) is the k-th P, or None for AdamW."""
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


def steps(tx, params, sequence):
    update, state, path = jax.jit(tx.update), tx.init(params), []
    for grads in sequence:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    assert update._cache_size() == 1
    return path, state


def normal(shape, num_steps, seed=0):
    """Draws weights, and gradients with very different sizes, so that the growth limit binds."""
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
    data = {name: normal(shape, 6, seed) for seed, (name, shape) in enumerate(shapes.items())}
    with jax.enable_x64(True):
        draws = {"flat": 1, "square": 3, "tall": 4}  # the index among the sorted names
        expected = {
            name: numpy_loop(
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
        drawn = module.projection  # in float64 here, because float32 would draw other numbers
        monkeypatch.setattr(
            module,
            "projection",
            lambda key, shape, dtype: drawn(key, shape, jnp.float64).astype(dtype),
        )
        path, _ = steps(
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
    weights, grads = normal((4, 7), 3)
    rules = [("embedding", {"adapt": False, "decay": False}), ("", {})]
    params = {"embedding": jnp.asarray(weights), "kernel": jnp.asarray(weights)}
    path, state = steps(
        apollo(0.01, rank=2, weight_decay=0.1, rules=rules),
        params,
        [{"embedding": jnp.asarray(g), "kernel": jnp.asarray(g)} for g in grads],
    )
    expected = numpy_loop(weights, grads, lambda _: None)
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
    # The last row of every gradient is 0, so a projection to the first 5 of 6 rows loses nothing.
    monkeypatch.setattr(module, "projection", lambda _, shape, dtype: jnp.eye(*shape, dtype=dtype))
    weights, grads = normal((6, 9), 4)
    with jax.enable_x64(True):
        params = jnp.asarray(weights)
        tx, adam = apollo(0.1, rank=5, growth_limit=None, eps=1e-30), optax.adam(0.1, eps=1e-30)
        state, adam_state = tx.init(params), adam.init(params)
        step, adam_step = jax.jit(tx.update), jax.jit(adam.update)
        for grad in grads:
            grad = jnp.asarray(grad).at[-1].set(0.0)
            update, state = step(grad, state, params)
            expected, adam_state = adam_step(grad, adam_state)
            norms = np.linalg.norm(update, axis=0)
            np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=0), rtol=1e-7)
            np.testing.assert_allclose(
                update / norms, -grad / np.linalg.norm(grad, axis=0), rtol=0, atol=1e-12
            )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("arguments", [{"rank": 2}, MINI])
def test_stacked_layers_equal_separate_ones(axis, arguments, monkeypatch):
    layers = [normal((5, 8), 4, seed) for seed in range(3)]
    rng = np.random.default_rng(9)
    matrices = jnp.asarray(rng.standard_normal((3, 5, arguments["rank"])), jnp.float32)

    def stack(arrays):
        return jnp.stack([jnp.asarray(a, jnp.float32) for a in arrays], axis)

    monkeypatch.setattr(module, "projection", lambda *_: matrices)
    tx = apollo(0.1, weight_decay=0.1, rules=[("", {"layer_axes": (axis,)})], **arguments)
    path, _ = steps(
        tx, stack([w for w, _ in layers]), [stack([g[t] for _, g in layers]) for t in range(4)]
    )
    for index, (weights, grads) in enumerate(layers):
        monkeypatch.setattr(module, "projection", lambda *_, index=index: matrices[index])
        alone, _ = steps(
            apollo(0.1, weight_decay=0.1, **arguments),
            jnp.asarray(weights, jnp.float32),
            [jnp.asarray(g, jnp.float32) for g in grads],
        )
        for stacked, separate in zip(path, alone, strict=True):
            np.testing.assert_allclose(jnp.take(stacked, index, axis), separate, rtol=0, atol=1e-6)


def test_stacked_layers_have_separate_projections():
    matrix = jnp.broadcast_to(jnp.arange(12.0).reshape(3, 4), (2, 3, 4))
    tx = apollo(0.1, rank=1, rules=[("", {"layer_axes": (0,)})])
    _, state = jax.jit(tx.update)(matrix, tx.init(matrix), matrix)
    assert state.mu.shape == (2, 1, 4) and state.norms.shape == (2, 1, 1)
    assert np.abs(state.mu[0] - state.mu[1]).min() > 1e-3


def test_norms_grow_by_the_limit_at_most():
    params = jnp.ones((3, 5))
    tx = apollo(1.0, rank=1, b2=0.0, growth_limit=1.01)
    state, norms, update = tx.init(params), [], jax.jit(tx.update)
    for size in (1.0, 1e-4, 1e-4):  # the first moment outlasts the small gradients
        _, state = update(size * jnp.ones((3, 5)), state, params)
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
def test_moments_are_not_reset_when_the_projection_changes(arguments):
    weights, grads = normal((4, 6), 1)
    grad = jnp.asarray(grads[0], jnp.float32)
    tx = apollo(0.1, update_gap=2, **arguments)
    state, mus, update = tx.init(grad), [], jax.jit(tx.update)
    for _ in range(4):
        _, state = update(grad, state, grad)
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
def test_sharded_equals_full(axis_type, spec, arguments):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    weights, grads = normal((16, 24), 3)
    full, state = steps(
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
            np.testing.assert_allclose(params, full[t], rtol=0, atol=2e-6)
        assert update._cache_size() == 1
    np.testing.assert_allclose(sharded_state.mu, state.mu, rtol=0, atol=2e-6)


def test_replicas_inside_shard_map_move_alike():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    weights, grads = normal((4, 6), 8)
    params, grads = jnp.asarray(weights), jnp.asarray(np.stack(grads))
    tx = apollo(0.1, rank=2)

    def body(params, grads):
        return tx.update(jax.lax.pmean(grads[0], "x"), tx.init(params), params)[0]

    full, _ = tx.update(jnp.mean(grads, 0), tx.init(params), params)
    inside = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("x")),
            out_specs=PartitionSpec(),
        )
    )(params, grads)
    np.testing.assert_allclose(inside, full, rtol=0, atol=1e-6)


def test_narrow_parameters_have_wide_state():
    params = {"kernel": jnp.ones((4, 6), jnp.bfloat16), "bias": jnp.ones(6, jnp.bfloat16)}
    tx = apollo(0.1, rank=2, collect=True)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    assert state.diagnostics.ratios["kernel"] == 1.0
    np.testing.assert_allclose(
        state.diagnostics.update_norms["kernel"],
        np.linalg.norm(np.float32(updates["kernel"])),
        rtol=1e-2,
    )


def test_inject_hyperparams():
    weights, grads = normal((4, 6), 3)
    params, grads = jnp.asarray(weights, jnp.float32), [jnp.asarray(g, jnp.float32) for g in grads]
    injected = optax.inject_hyperparams(apollo, static_args="rank")(0.1, rank=2, update_gap=2)
    expected, _ = steps(apollo(0.1, rank=2, update_gap=2), params, grads)
    path, _ = steps(injected, params, grads)
    np.testing.assert_allclose(path[-1], expected[-1], rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match=r"not allowed for rank; .*static_args=\('rank',\)"):
        optax.inject_hyperparams(apollo)(0.1, rank=2).init(params)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rank": 0}, "rank=0 must be a whole number of at least 1"),
        ({"scaling": "row"}, "scaling='row' must be one of channel, tensor"),
        ({"growth_limit": 0.9}, "growth_limit=0.9 must be at least 1, or None"),
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
