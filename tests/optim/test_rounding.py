"""Tests stochastic rounding: representable sums are exact, and other sums are exact on average."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim.rounding import round_to_bfloat16, stochastic_rounding

pytestmark = pytest.mark.optimized

BF16 = ml_dtypes.bfloat16
# The inner transform returns the update that a test wants to add.
GIVEN = optax.identity()


def _add(params, update, seed=0, steps=1):
    """Returns the weights after `steps` identical updates."""
    tx = stochastic_rounding(GIVEN, seed)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(update, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def _pairs(num):
    """Returns weights and updates with many exponents; a third of the sums nearly or exactly cancel."""
    rng = np.random.default_rng(0)

    def draw():
        signs = rng.choice([-1, 1], num)
        return signs * rng.uniform(1, 2, num) * 2.0 ** rng.integers(-100, 100, num)

    weights = draw().astype(BF16)
    update = draw()
    near = weights.astype(np.float64) * -(
        1 + rng.choice([-1, 0, 1], num) * 2.0 ** -rng.integers(0, 25, num)
    )
    some = weights.astype(np.float64) * 2.0 ** -rng.integers(-12, 25, num) * rng.uniform(-2, 2, num)
    kind = rng.integers(0, 3, num)
    return weights, np.select([kind == 0, kind == 1], [update, near], some).astype(np.float32)


def test_applying_gives_exactly_a_neighbour_of_the_sum():
    weights, update = _pairs(300_000)
    actual = np.asarray(_add(jnp.asarray(weights), jnp.asarray(update)))
    assert actual.dtype == BF16
    exact = weights.astype(np.float32) + update
    lower = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # towards 0
    upper = ((exact.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    actual = actual.astype(np.float32)
    representable = lower == exact
    assert 0.05 < representable.mean() < 0.95
    np.testing.assert_array_equal(actual[representable], exact[representable])
    assert np.all((actual == lower) | (actual == upper))
    assert 0.1 < np.mean((actual == upper)[~representable]) < 0.9

    # The new weight equals the rounded value, so the transform may return a difference.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)
    drawn = round_to_bfloat16(key, jnp.asarray(exact))
    np.testing.assert_array_equal(actual, np.asarray(drawn))


def test_without_an_update_the_weight_stays():
    every = np.arange(2**16, dtype=np.uint16).view(BF16)
    normal = np.abs(every.astype(np.float32)) >= np.finfo(np.float32).tiny  # including infinities
    weights = np.concatenate([every[normal], np.zeros(1, BF16)])
    actual = _add(jnp.asarray(weights), jnp.zeros(weights.shape, jnp.float32), steps=3)
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint16), weights.view(np.uint16))


def test_infinities_nan_and_underflow():
    big, tiny = np.float32(3.3e38), np.finfo(np.float32).tiny
    weights = np.array([np.inf, -np.inf, 1, 1, np.nan, np.inf, 1, big, 1.5 * tiny, tiny], BF16)
    update = np.array(
        [1, 1, np.inf, -np.inf, 1, -np.inf, np.nan, big, -1.25 * tiny, -tiny], np.float32
    )
    actual = np.asarray(_add(jnp.asarray(weights), jnp.asarray(update))).astype(np.float32)
    np.testing.assert_array_equal(
        actual[:8], [np.inf, -np.inf, np.inf, -np.inf, np.nan, np.nan, np.nan, np.inf]
    )
    assert 0 <= actual[8] <= tiny / 2  # values below the smallest normal number may become 0
    assert actual[9] == 0
    full = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)  # NaN with all bits set
    assert np.all(np.isnan(round_to_bfloat16(jax.random.key(0), jnp.asarray(full))))


@pytest.mark.parametrize(
    "weight, update", [(1.0, 1e-3), (-3.0, 1e-3), (1.0, -1e-4), (1e-20, 3e-23)]
)
def test_the_mean_is_exact(weight, update):
    num = 200_000
    params = jnp.full(num, weight, jnp.bfloat16)
    actual = np.asarray(_add(params, jnp.full(num, update, jnp.float32), seed=3)).astype(np.float64)
    expected = np.float64(np.float32(BF16(weight)) + np.float32(update))
    values = np.unique(actual)
    assert len(values) == 2 and values[0] < expected < values[1]
    part = (expected - values[0]) / (values[1] - values[0])
    sigma = np.sqrt(part * (1 - part) / num) * (values[1] - values[0])
    assert abs(actual.mean() - expected) < 4 * sigma


def test_the_mean_over_seeds_is_exact():
    values = jnp.array([1 + 1e-3, -3.01, 7e-12, 1 + 2**-8], jnp.float32)
    num = 20_000
    keys = jax.vmap(jax.random.key)(jnp.arange(num))
    rounded = jax.vmap(round_to_bfloat16, (0, None))(keys, values)
    rounded, values = np.asarray(rounded, np.float64), np.asarray(values, np.float64)
    deviation = rounded.std(0)
    assert np.all(deviation > 0)
    assert np.all(np.abs(rounded.mean(0) - values) < 4 * deviation / np.sqrt(num))


def test_seeds_differ():
    actual = [_add(jnp.ones(1000, jnp.bfloat16), jnp.full(1000, 1 / 256), seed) for seed in (0, 1)]
    assert 400 < np.sum(np.asarray(actual[0]) == np.asarray(actual[1])) < 600


def test_small_updates_add_up_where_rounding_to_nearest_loses_them():
    num, steps = 4096, 200
    nearest = params = jnp.ones(num, jnp.bfloat16)
    update = jnp.full(num, 1e-3, jnp.float32)
    for _ in range(steps):
        nearest = optax.apply_updates(nearest, update)
    np.testing.assert_array_equal(nearest, params)
    actual = np.asarray(_add(params, update, steps=steps)).astype(np.float64)
    # A step has a variance of at most (1/2)^2 / 128^2, and steps are independent.
    assert abs(actual.mean() - 1.2) < 4 * np.sqrt(steps / num) / 256
    assert 0.01 < actual.std() < np.sqrt(steps) / 256


def test_leaves_and_updates_draw_different_bits():
    params = {"a": jnp.ones(1000, jnp.bfloat16), "b": jnp.ones(1000, jnp.bfloat16)}
    update = jax.tree.map(
        lambda p: jnp.full(p.shape, 1 / 256), params
    )  # rounds up or down with equal probability
    tx = stochastic_rounding(GIVEN)
    first, state = tx.update(update, tx.init(params), params)
    second, state = tx.update(update, state, params)
    assert state.count == 2
    for one, other in ((first["a"], first["b"]), (first["a"], second["a"])):
        assert 400 < np.sum(np.asarray(one) == np.asarray(other)) < 600


def _tree(dtype=jnp.bfloat16):
    rng = np.random.default_rng(1)
    shapes = {"kernel": (16, 8), "bias": (8,), "temperature": ()}
    return (
        {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
        for _ in range(2)
    )


def _train(tx, params, grads, steps=4, compilations=1):
    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    state = tx.init(params)
    for _ in range(steps):
        before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        params, state, updates = step(params, state)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == before
    assert step._cache_size() <= compilations
    return params, updates


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_leaves_pass_through(dtype):
    with jax.enable_x64(True):
        params, grads = _tree(dtype)
        plain, _ = _train(optim.lamb(0.1), params, grads)
        wrapped, _ = _train(stochastic_rounding(optim.lamb(0.1)), params, grads)
        jax.tree.map(np.testing.assert_array_equal, wrapped, plain)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.clip_by_global_norm(1e6), tx),
        lambda tx: optax.MultiSteps(tx, every_k_schedule=1),
    ],
)
def test_follows_the_float32_weights(wrap):
    params, grads = _tree()
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, grads))
    expected, _ = _train(optim.lamb(0.01), *wide)
    actual, updates = _train(wrap(stochastic_rounding(optim.lamb(0.01))), params, grads)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(actual)} == {"bfloat16"}
    # Each of four updates has an error below one unit in the last place, 2^-7 of the weight.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.float32(a), b, rtol=4 * 2**-7, atol=1e-3),
        actual,
        expected,
    )


def test_moments_are_float32_and_inner_sees_float32():
    seen = []

    def look(grads, params):
        seen.extend(leaf.dtype.name for leaf in jax.tree.leaves((grads, params)))
        return grads

    tx = stochastic_rounding(optax.chain(optax.stateless(look), optax.adam(0.1)))
    params, grads = {"w": jnp.ones(4, jnp.bfloat16)}, {"w": jnp.ones(4, jnp.bfloat16)}
    _, state = tx.update(grads, tx.init(params), params)
    assert seen == ["float32", "float32"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


def test_between_the_updates_of_multi_steps_nothing_moves():
    params, grads = _tree()
    inner = optax.MultiSteps(optim.lamb(0.1), every_k_schedule=2).gradient_transformation()
    once, _ = _train(stochastic_rounding(inner), params, grads, steps=1)
    jax.tree.map(np.testing.assert_array_equal, once, params)
    twice, _ = _train(stochastic_rounding(inner), params, grads, steps=2)
    assert np.any(np.asarray(twice["kernel"]) != np.asarray(params["kernel"]))


def test_extra_arguments_reach_the_inner_transform():
    tx = stochastic_rounding(
        optax.GradientTransformationExtraArgs(
            lambda params: (), lambda g, state, params=None, *, value: (g * value, state)
        )
    )
    params = jnp.ones(2, jnp.bfloat16)
    updates, _ = tx.update(jnp.ones(2), tx.init(params), params, value=2.0)
    np.testing.assert_array_equal(updates, 2.0)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_weights_round_like_full_ones(axis_type):
    params, grads = _tree()
    expected, _ = _train(stochastic_rounding(optax.sgd(1e-3)), params, grads)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):

        def place(tree):
            specs = {
                "kernel": PartitionSpec("x", None),
                "bias": PartitionSpec("x"),
                "temperature": PartitionSpec(),
            }
            return jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), tree, specs)

        # The count is on one device in the first call, and on all devices afterwards.
        actual, _ = _train(
            stochastic_rounding(optax.sgd(1e-3)), place(params), place(grads), compilations=2
        )
        assert actual["kernel"].sharding.spec[0] == "x"
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.long
def test_replicas_round_alike():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params, grads = _tree()
    tx = stochastic_rounding(optax.sgd(1e-3))
    expected, _ = tx.update(grads, tx.init(params), params)

    def update(params, grads):
        return tx.update(grads, tx.init(params), params)[0]

    inside = jax.jit(
        jax.shard_map(
            lambda p, g: jax.tree.map(lambda leaf: leaf[None], update(p, g)),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec("x"),
            check_vma=False,
        )
    )(params, grads)
    mapped = jax.pmap(lambda _, p, g: update(p, g), in_axes=(0, None, None))(
        jnp.arange(8), params, grads
    )
    for replicas in (inside, mapped):
        jax.tree.map(
            lambda one, every: np.testing.assert_array_equal(
                every, np.broadcast_to(one, (8, *one.shape))
            ),
            expected,
            replicas,
        )


@pytest.mark.long
def test_shards_round_differently_and_replicas_alike():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    axes = {"both": ("x", "y"), "rows": "x", "whole": None}
    specs = {
        "both": PartitionSpec(("x", "y")),
        "rows": PartitionSpec("x"),
        "whole": PartitionSpec(),
    }
    # All rows are equal, so shards only differ by their random bits.
    params = {
        "both": jnp.ones((8, 256), jnp.bfloat16),
        "rows": jnp.ones((4, 256), jnp.bfloat16),
        "whole": jnp.ones((1, 256), jnp.bfloat16),
    }
    grads = jax.tree.map(lambda p: jnp.full(p.shape, -1e-3), params)

    def update(params, grads, axis_name=None):
        tx = stochastic_rounding(optax.sgd(1.0), axis_name=axis_name)
        return tx.update(grads, tx.init(params), params)[0]

    every = PartitionSpec(("x", "y"))  # the values of each device
    actual = jax.jit(
        jax.shard_map(
            lambda p, g: update(p, g, axes.get),
            mesh=mesh,
            in_specs=(specs, specs),
            out_specs=every,
            check_vma=False,
        )
    )(params, grads)
    assert {len(np.unique(actual[name], axis=0)) for name in actual} == {8, 4, 1}
    np.testing.assert_array_equal(actual["rows"][::2], actual["rows"][1::2])  # replicas along y
    np.testing.assert_array_equal(actual["whole"][:1], update(params, grads)["whole"])
    for leaf in actual.values():  # two neighbours of 1, and the correct mean
        assert set(np.unique(leaf)) == {0.0, 2**-7}
        assert abs(np.mean(leaf) - 1e-3) < 5 * 2**-7 * np.sqrt(0.128 * 0.872 / 256)
    with pytest.raises(ValueError, match="axis_name='x' is not bound here"):
        update(params, grads, "x")


def test_bad_arguments():
    with pytest.raises(ValueError, match="seed=-1 must be a whole number of at least 0"):
        stochastic_rounding(GIVEN, -1)
    with pytest.raises(ValueError, match="'dense/kernel' is float16"):
        stochastic_rounding(GIVEN).init({"dense": {"kernel": jnp.ones(2, jnp.float16)}})
    tx = stochastic_rounding(GIVEN)
    params = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="params is None"):
        tx.update(params, tx.init(params))
