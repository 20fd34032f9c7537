"""Dropout: the mask belongs to the example, wherever and with whomever it is computed."""

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
from tests.quick import jit

KEY = jax.random.key(0)
ROWS, WIDTH, DEVICES = 64, 96, 8
ONES = np.ones((ROWS, WIDTH), np.float32)


def drop(x: Any, key: jax.Array = KEY, rate: float = 0.4) -> jax.Array:
    return Dropout(rate).apply({}, x, train=True, rngs={"dropout": key})


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.9])
def test_the_share_dropped_is_the_rate_in_every_row_and_place(rate: float) -> None:
    x = np.random.default_rng(0).uniform(1, 2, (1000, 800)).astype(np.float32)
    y = np.asarray(drop(x, rate=rate))
    kept = y != 0
    # What is drawn is the nearest multiple of 2^-16, and divided by what that leaves.
    drawn = np.round(rate * 65536) / 65536
    np.testing.assert_allclose(y[kept], x[kept] / (1 - drawn), rtol=1e-6)
    assert dropout_lib.rounded(rate) == drawn and abs(drawn - rate) < 2**-17
    one = np.sqrt(rate * (1 - rate))  # standard deviation of one value

    def near(share: np.ndarray, count: float, sigmas: float = 5.0) -> None:
        assert np.max(np.abs(share - (1 - rate))) < sigmas * one / np.sqrt(count)

    near(kept.mean(), kept.size, 4)
    near(kept.mean(1), 800)
    near(kept.mean(0), 1000)
    # Neighbours in a row and in a column know nothing of each other.
    for a, b in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        correlation = np.mean((a - (1 - rate)) * (b - (1 - rate))) / one**2
        assert abs(correlation) < 5 / np.sqrt(a.size)


class Layers(nn.Module):
    """The masks of two layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        return [Dropout(0.4)(x, True) for _ in range(2)]


def test_rows_layers_and_updates_differ() -> None:
    kept = [
        np.asarray(mask) != 0
        for update in range(2)
        for mask in Layers().apply({}, ONES, rngs={"dropout": jax.random.fold_in(KEY, update)})
    ]
    assert len(kept) == 4
    rows = np.concatenate(kept)
    # Two independent masks agree in 0.4^2 + 0.6^2 = 0.52 of the places.
    agree = np.mean(rows[:, None] == rows, -1)[np.triu_indices(len(rows), 1)]
    assert agree.max() < 0.85 and abs(agree.mean() - 0.52) < 0.005


@pytest.mark.long
def test_a_row_is_told_by_its_position_alone() -> None:
    whole = drop(ONES)
    order = np.random.default_rng(0).permutation(ROWS)[:7]
    with example_positions(jnp.asarray(order)):
        np.testing.assert_array_equal(drop(ONES[:7]), whole[order])
    np.testing.assert_array_equal(drop(ONES[:5]), whole[:5])
    # With more axes in a row, and one alone.
    many = drop(ONES.reshape(ROWS, 4, WIDTH // 4))
    np.testing.assert_array_equal(drop(ONES.reshape(ROWS, 4, -1)[:3]), many[:3])
    np.testing.assert_array_equal(drop(ONES[:3, 0]), drop(ONES[:, 0])[:3])


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def part(x: jax.Array, key: jax.Array) -> jax.Array:
    """A device's rows, inside shard_map or pmap over 'data'."""
    with example_positions(jax.lax.axis_index("data") * len(x) + jnp.arange(len(x))):
        return drop(x, key)


def microbatches(x: jax.Array, key: jax.Array) -> jax.Array:
    parts = x.reshape(4, -1, *x.shape[1:])

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x, positions = inputs
        with example_positions(positions):
            return None, drop(x, key)

    return jax.lax.scan(step, None, (parts, jnp.arange(len(x)).reshape(4, -1)))[1].reshape(x.shape)


def over_devices(run: Callable[..., Any]) -> Callable[..., Any]:
    split = NamedSharding(mesh(), P("data"))
    return jit(run, in_shardings=(split, None), out_shardings=split)


def over_rows(x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh(), P("data")))


PLACEMENTS = {
    "jit, 8": over_devices(drop),
    "jit, 8, microbatches": over_devices(microbatches),
    "microbatches": jit(microbatches),
    "shard_map, 8": jit(
        jax.shard_map(part, mesh=mesh(), in_specs=(P("data"), P()), out_specs=P("data"))
    ),
    "pmap, 8": lambda x, key: jax.pmap(part, "data", in_axes=(0, None))(
        x.reshape(DEVICES, -1, WIDTH), key
    ).reshape(x.shape),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_has_the_same_mask(placement: str) -> None:
    np.testing.assert_array_equal(PLACEMENTS[placement](ONES, KEY), drop(ONES))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_generators(placement: str) -> None:
    """The docstring's claim about rbg: parts have another mask, and no two parts share one."""
    key = jax.random.key(0, impl="rbg")
    whole, found = np.asarray(drop(ONES, key)), np.asarray(PLACEMENTS[placement](ONES, key))
    if placement == "jit, 8":
        np.testing.assert_array_equal(found, whole)
        return
    assert np.any(found != whole)
    assert abs(np.mean(found != 0) - 0.6) < 0.03
    assert len(np.unique(found, axis=0)) == ROWS


def test_devices_draw_their_own_rows_only() -> None:
    x, key = jax.ShapeDtypeStruct(ONES.shape, ONES.dtype), KEY
    program = PLACEMENTS["jit, 8"].lower(x, key).compile().as_text()
    assert not re.search(r"all-gather|all-reduce|collective|all-to-all", program)
    # Two values from a word.
    assert f"u32[{ROWS // DEVICES},{WIDTH // 2}]" in program
    assert f"u32[{ROWS},{WIDTH // 2}]" not in program


def test_other_generators_under_jit_with_a_mesh() -> None:
    x, key = jax.ShapeDtypeStruct(ONES.shape, ONES.dtype), jax.random.key(0, impl="rbg")

    def twice(x: jax.Array, key: jax.Array) -> jax.Array:
        # The mask that a backward pass draws again.
        return jax.grad(lambda x: jnp.sum(jax.checkpoint(drop)(x, key) ** 2) / 2)(x)

    with jax.set_mesh(mesh()):
        compiled = [over_devices(run).lower(x, key).compile() for run in (drop, twice)]
    program = compiled[0].as_text()
    assert not re.search(r"all-gather|all-reduce|collective|all-to-all", program)
    assert f"[{ROWS // DEVICES},{WIDTH}]" in program and f"[{ROWS},{WIDTH}]" not in program
    found, again = (np.asarray(run(over_rows(ONES), key)) for run in compiled)
    np.testing.assert_array_equal(found, PLACEMENTS["shard_map, 8"](ONES, key))
    np.testing.assert_allclose(again, found / 0.6, rtol=1e-4)  # squares of 0 or 1 / 0.6
    # A batch that the devices do not divide is drawn as a whole.
    with jax.set_mesh(mesh()):
        part = jit(drop)(ONES[:7], key)
    np.testing.assert_array_equal(part, drop(ONES[:7], key))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        return jnp.sin(Dropout(0.4)(x, True) + 1), None


def grad_of(block: type[nn.Module] | Any, x: jax.Array, positions: jax.Array) -> jax.Array:
    with example_positions(positions):
        return jax.grad(lambda x: jnp.sum(block().apply({}, x, rngs={"dropout": KEY})[0] ** 2))(x)


def stack(block: type[nn.Module]) -> Callable[[], nn.Module]:
    """Three layers in a scan."""
    scan = nn.scan(block, {}, split_rngs={"dropout": True}, length=3)
    return lambda: scan()


def test_under_remat_and_scan() -> None:
    x, positions = jax.random.normal(KEY, (4, WIDTH)), jnp.array([9, 2, 30, 4])
    run = jit(grad_of, static_argnums=0)
    plain = run(Block, x, positions)
    np.testing.assert_allclose(run(nn.remat(Block), x, positions), plain, rtol=1e-5, atol=1e-6)
    # In a stack too, on which remat must change nothing.
    scanned = run(stack(Block), x, positions)
    np.testing.assert_allclose(run(stack(nn.remat(Block)), x, positions), scanned, 1e-5, 1e-6)
    # Of 32 equal rows those at the same positions.
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
            # Made inside the block, as `example_positions` asks.
            layer = wrap(lambda x: jnp.sin(drop(x)) ** 2)
            return jax.grad(lambda x: jnp.sum(layer(x)))(x)

    x = jax.random.normal(KEY, (4, WIDTH))
    for positions in (jnp.arange(4), jnp.arange(4) + 17):
        plain = jit(lambda p: grad(lambda f: f, x, p))(positions)
        again = jit(lambda p: grad(jax.checkpoint, x, p))(positions)
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-6)


def test_whole_examples() -> None:
    drop_rows = Dropout(0.4, whole_examples=True).apply
    x = np.random.default_rng(0).uniform(1, 2, (1000, 2, 3)).astype(np.float32)
    found = np.asarray(drop_rows({}, x, train=True, rngs={"dropout": KEY}))
    kept = found[:, 0, 0] != 0
    drawn = np.round(0.4 * 65536) / 65536
    np.testing.assert_allclose(found, x * kept[:, None, None] / (1 - drawn), rtol=1e-6)
    assert abs(kept.mean() - 0.6) < 5 * np.sqrt(0.24 / 1000)
    # An example is told by its position alone.
    some = np.array([700, 3, 998, 11, 12])
    with example_positions(jnp.asarray(some)):
        part = drop_rows({}, x[some], train=True, rngs={"dropout": KEY})
    np.testing.assert_array_equal(part, found[some])
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
    with pytest.raises(ValueError, match=r"rate of dropout must be in \[0, 1\), not "):
        Dropout(rate).init(KEY, ONES, train=False)


def test_positions_are_those_of_the_rows() -> None:
    with example_positions(jnp.arange(3)):
        with pytest.raises(ValueError, match="64 rows and positions of shape .3,.; it takes one"):
            drop(ONES)
    # The block is over, also after an error.
    with pytest.raises(KeyError):
        with example_positions(jnp.arange(ROWS) + 1):
            raise KeyError
    assert np.any(drop(ONES) != 0)


def test_docstrings() -> None:
    result = doctest.testmod(dropout_lib)
    assert result.failed == 0 and result.attempted == 4
