"""Dropout: the mask depends on the example and not on its device, shard or microbatch."""

import doctest
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu.models import dropout as dropout_lib
from lamb_tpu.models.dropout import Dropout, example_positions
from tests.raising import rejected

KEY = jax.random.key(0)
ROWS, WIDTH, DEVICES = 64, 96, 8
ONES = np.ones((ROWS, WIDTH), np.float32)


def drop(x: Any, key: jax.Array = KEY, rate: float = 0.4) -> jax.Array:
    return Dropout(rate).apply({}, x, train=True, rngs={"dropout": key})


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.9])
def test_the_dropped_fraction_is_the_rate_in_every_row_and_column(rate: float) -> None:
    x = np.random.default_rng(0).uniform(1, 2, (1000, 800)).astype(np.float32)
    y = np.asarray(drop(x, rate=rate))
    undropped = y != 0
    # Both the mask and the factor of undropped values use the rate rounded to a multiple of 2^-16.
    drawn = np.round(rate * 65536) / 65536
    np.testing.assert_allclose(y[undropped], x[undropped] / (1 - drawn), rtol=1e-6)
    assert dropout_lib.rounded(rate) == drawn and abs(drawn - rate) < 2**-17
    one = np.sqrt(rate * (1 - rate))  # standard deviation of one value

    def near(share: np.ndarray, count: float, sigmas: float = 5.0) -> None:
        assert np.max(np.abs(share - (1 - rate))) < sigmas * one / np.sqrt(count)

    near(undropped.mean(), undropped.size, 4)
    near(undropped.mean(1), 800)
    near(undropped.mean(0), 1000)
    # Neighbours in a row and in a column are independent.
    for a, b in ((undropped[:, 1:], undropped[:, :-1]), (undropped[1:], undropped[:-1])):
        correlation = np.mean((a - (1 - rate)) * (b - (1 - rate))) / one**2
        assert abs(correlation) < 5 / np.sqrt(a.size)


class Layers(nn.Module):
    """Returns the masks of two layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        return [Dropout(0.4)(x, True) for _ in range(2)]


def test_rows_layers_and_updates_differ() -> None:
    undropped = [
        np.asarray(mask) != 0
        for update in range(2)
        for mask in Layers().apply({}, ONES, rngs={"dropout": jax.random.fold_in(KEY, update)})
    ]
    assert len(undropped) == 4
    rows = np.concatenate(undropped)
    # Two independent masks agree at 0.4^2 + 0.6^2 = 0.52 of the positions.
    agree = np.mean(rows[:, None] == rows, -1)[np.triu_indices(len(rows), 1)]
    assert agree.max() < 0.85 and abs(agree.mean() - 0.52) < 0.005


@pytest.mark.long
def test_a_rows_mask_depends_only_on_its_position() -> None:
    full = drop(ONES)
    order = np.random.default_rng(0).permutation(ROWS)[:7]
    with example_positions(jnp.asarray(order)):
        np.testing.assert_array_equal(drop(ONES[:7]), full[order])
    np.testing.assert_array_equal(drop(ONES[:5]), full[:5])
    # The same holds with more axes per row, and with a single value per row.
    many = drop(ONES.reshape(ROWS, 4, WIDTH // 4))
    np.testing.assert_array_equal(drop(ONES.reshape(ROWS, 4, -1)[:3]), many[:3])
    np.testing.assert_array_equal(drop(ONES[:3, 0]), drop(ONES[:, 0])[:3])


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def shard(x: jax.Array, key: jax.Array) -> jax.Array:
    """Drops values of a device's rows, inside shard_map or pmap over 'data'."""
    with example_positions(jax.lax.axis_index("data") * len(x) + jnp.arange(len(x))):
        return drop(x, key)


def microbatches(x: jax.Array, key: jax.Array) -> jax.Array:
    shards = x.reshape(4, -1, *x.shape[1:])

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x, positions = inputs
        with example_positions(positions):
            return None, drop(x, key)

    return jax.lax.scan(step, None, (shards, jnp.arange(len(x)).reshape(4, -1)))[1].reshape(x.shape)


def over_devices(run: Callable[..., Any]) -> Callable[..., Any]:
    split = NamedSharding(mesh(), P("data"))
    return jax.jit(run, in_shardings=(split, None), out_shardings=split)


def over_rows(x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh(), P("data")))


PLACEMENTS = {
    "jit, 8": over_devices(drop),
    "jit, 8, microbatches": over_devices(microbatches),
    "microbatches": jax.jit(microbatches),
    "shard_map, 8": jax.jit(
        jax.shard_map(shard, mesh=mesh(), in_specs=(P("data"), P()), out_specs=P("data"))
    ),
    "pmap, 8": lambda x, key: jax.pmap(shard, "data", in_axes=(0, None))(
        x.reshape(DEVICES, -1, WIDTH), key
    ).reshape(x.shape),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_sharding_has_the_same_mask(placement: str) -> None:
    np.testing.assert_array_equal(PLACEMENTS[placement](ONES, KEY), drop(ONES))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_generators(placement: str) -> None:
    """With rbg keys, except under jit, masks differ between shards, and from the masks on one device."""
    key = jax.random.key(0, impl="rbg")
    full, actual = np.asarray(drop(ONES, key)), np.asarray(PLACEMENTS[placement](ONES, key))
    if placement == "jit, 8":
        np.testing.assert_array_equal(actual, full)
        return
    assert np.any(actual != full)
    assert abs(np.mean(actual != 0) - 0.6) < 0.03
    assert len(np.unique(actual, axis=0)) == ROWS


def test_devices_only_draw_bits_for_their_rows() -> None:
    x, key = jax.ShapeDtypeStruct(ONES.shape, ONES.dtype), KEY
    program = PLACEMENTS["jit, 8"].lower(x, key).compile().as_text()
    assert not re.search(r"all-gather|all-reduce|collective|all-to-all", program)
    # The bits for two values are drawn as one 32-bit word.
    assert f"u32[{ROWS // DEVICES},{WIDTH // 2}]" in program
    assert f"u32[{ROWS},{WIDTH // 2}]" not in program


def test_other_generators_under_jit_with_a_mesh() -> None:
    x, key = jax.ShapeDtypeStruct(ONES.shape, ONES.dtype), jax.random.key(0, impl="rbg")

    def twice(x: jax.Array, key: jax.Array) -> jax.Array:
        # The backward pass draws the mask again.
        return jax.grad(lambda x: jnp.sum(jax.checkpoint(drop)(x, key) ** 2) / 2)(x)

    with jax.set_mesh(mesh()):
        compiled = [over_devices(run).lower(x, key).compile() for run in (drop, twice)]
    program = compiled[0].as_text()
    assert not re.search(r"all-gather|all-reduce|collective|all-to-all", program)
    assert f"[{ROWS // DEVICES},{WIDTH}]" in program and f"[{ROWS},{WIDTH}]" not in program
    actual, again = (np.asarray(run(over_rows(ONES), key)) for run in compiled)
    np.testing.assert_array_equal(actual, PLACEMENTS["shard_map, 8"](ONES, key))
    np.testing.assert_allclose(again, actual / 0.6, rtol=1e-4)  # squares of 0 or 1 / 0.6
    # If the batch is not divisible by the number of devices, every device draws the full mask.
    with jax.set_mesh(mesh()):
        shard = jax.jit(drop)(ONES[:7], key)
    np.testing.assert_array_equal(shard, drop(ONES[:7], key))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        return jnp.sin(Dropout(0.4)(x, True) + 1), None


def grad_of(block: type[nn.Module] | Any, x: jax.Array, positions: jax.Array) -> jax.Array:
    with example_positions(positions):
        return jax.grad(lambda x: jnp.sum(block().apply({}, x, rngs={"dropout": KEY})[0] ** 2))(x)


def stack(block: type[nn.Module]) -> Callable[[], nn.Module]:
    """Returns a function that makes three layers in a scan."""
    scan = nn.scan(block, {}, split_rngs={"dropout": True}, length=3)
    return lambda: scan()


def test_under_remat_and_scan() -> None:
    x, positions = jax.random.normal(KEY, (4, WIDTH)), jnp.array([9, 2, 30, 4])
    run = jax.jit(grad_of, static_argnums=0)
    plain = run(Block, x, positions)
    np.testing.assert_allclose(run(nn.remat(Block), x, positions), plain, rtol=1e-5, atol=1e-6)
    # In a stack of layers, remat must not change anything either.
    scanned = run(stack(Block), x, positions)
    np.testing.assert_allclose(run(stack(nn.remat(Block)), x, positions), scanned, 1e-5, 1e-6)
    # In a batch of 32 equal rows, the rows at the same positions have the same values.
    same = run(stack(Block), jnp.tile(x[:1], (32, 1)), jnp.arange(32))
    rows = run(stack(Block), jnp.tile(x[:1], (4, 1)), positions)
    np.testing.assert_allclose(rows, same[positions], 1e-5, 1e-6)
    assert len(np.unique(same, axis=0)) == 32


def test_layers_of_a_scan_differ() -> None:
    class Masks(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return x, Dropout(0.4)(x, True)

    scan = nn.scan(Masks, {}, split_rngs={"dropout": True}, length=3)
    _, masks = scan().apply({}, ONES, None, rngs={"dropout": KEY})
    agree = [np.mean((masks[i] != 0) == (masks[i - 1] != 0)) for i in range(3)]
    assert np.max(np.abs(np.array(agree) - 0.52)) < 0.03


def test_under_checkpoint_each_pass_draws_the_same_mask() -> None:
    def grad(wrap: Callable[..., Any], x: jax.Array, positions: jax.Array) -> jax.Array:
        with example_positions(positions):
            # Created inside the block, as `example_positions` requires.
            layer = wrap(lambda x: jnp.sin(drop(x)) ** 2)
            return jax.grad(lambda x: jnp.sum(layer(x)))(x)

    x = jax.random.normal(KEY, (4, WIDTH))
    for positions in (jnp.arange(4), jnp.arange(4) + 17):
        plain = jax.jit(lambda p: grad(lambda f: f, x, p))(positions)
        again = jax.jit(lambda p: grad(jax.checkpoint, x, p))(positions)
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-6)


def test_whole_examples() -> None:
    drop_rows = Dropout(0.4, whole_examples=True).apply
    x = np.random.default_rng(0).uniform(1, 2, (1000, 2, 3)).astype(np.float32)
    actual = np.asarray(drop_rows({}, x, train=True, rngs={"dropout": KEY}))
    undropped = actual[:, 0, 0] != 0
    drawn = np.round(0.4 * 65536) / 65536
    np.testing.assert_allclose(actual, x * undropped[:, None, None] / (1 - drawn), rtol=1e-6)
    assert abs(undropped.mean() - 0.6) < 5 * np.sqrt(0.24 / 1000)
    # An example's mask only depends on its position.
    some = np.array([700, 3, 998, 11, 12])
    with example_positions(jnp.asarray(some)):
        shard = drop_rows({}, x[some], train=True, rngs={"dropout": KEY})
    np.testing.assert_array_equal(shard, actual[some])
    half = drop_rows({}, jnp.asarray(x, jnp.bfloat16), train=True, rngs={"dropout": KEY})
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(drop_rows({}, x, train=False), x)


def test_nothing_without_training_or_rate() -> None:
    x = jnp.asarray(ONES, jnp.bfloat16)
    assert drop(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(Dropout(0.4).apply({}, x, train=False), x)
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, train=True), x)
    np.testing.assert_array_equal(drop(x, rate=1e-30), x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rate_out_of_range(rate: float) -> None:
    with rejected("dropout_rate", ..., "is out of range"):
        Dropout(rate).init(KEY, ONES, train=False)


def test_positions_are_those_of_the_rows() -> None:
    with example_positions(jnp.arange(3)):
        with pytest.raises(
            ValueError, match="positions has shape .3,., but must have shape .64,.: one per row"
        ):
            drop(ONES)
    # The end of the block resets the positions, even after an error.
    with pytest.raises(KeyError):
        with example_positions(jnp.arange(ROWS) + 1):
            raise KeyError
    assert np.any(drop(ONES) != 0)


def test_docstrings() -> None:
    result = doctest.testmod(dropout_lib)
    assert result.failed == 0 and result.attempted == 4
