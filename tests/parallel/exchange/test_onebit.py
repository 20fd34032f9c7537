"""Tests the 1-bit exchange: packing, error feedback, and sent bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.cost import traffic
from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange.onebit import OneBit, pack, unpack
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny
from tests.parallel.exchange import over
from tests.parallel.wire import wire_bytes
from tests.raising import rejected

SHAPES = {"kernel": (9, 5), "bias": (7,), "scalar": ()}


def draw(seed):
    (grads,) = over.gradients(SHAPES, 1, 4, seed)
    return jax.tree.map(jnp.asarray, grads)


def compressed(values):
    """Returns the signs of the values times one scale, and the values minus this result."""
    scale = np.sqrt(np.mean(values**2))
    actual = np.where(values >= 0, scale, -scale)
    return actual, values - actual


def by_hand(flat, errors, server):
    """Repeats the exchange in float64; `flat` has the padded vector of each device as a row."""
    sent, errors = zip(*map(compressed, flat + errors))
    chunks = sum(sent).reshape(len(flat), -1) + server
    actual, server = zip(*map(compressed, chunks))
    return np.concatenate(actual), np.stack(errors), np.stack(server)


@pytest.mark.parametrize("rows, width", [(1, 8), (3, 64), (2, 2048)])
def test_packing(rows, width):
    values = np.random.default_rng(0).standard_normal((rows, width))
    values[0, :3] = 0.0, -0.0, np.inf
    packed = pack(jnp.asarray(values))
    assert packed.dtype == jnp.uint8 and packed.shape == (rows, width // 8)
    scales = np.arange(1.0, rows + 1)
    expected = np.where(values >= 0, scales[:, None], -scales[:, None])
    np.testing.assert_array_equal(unpack(packed, jnp.asarray(scales)), expected)
    assert len(np.unique(pack(jnp.asarray([[1.0] * i + [-1.0] * (8 - i) for i in range(9)])))) == 9


@pytest.mark.parametrize("per_leaf", [True, False])
def test_three_sums_by_hand(per_leaf):
    exchange = OneBit(("d",), 4, per_leaf=per_leaf)
    lengths = [32, 64, 32] if per_leaf else [64]  # bias, kernel, scalar; padded to 4 x 8
    residual = over.start(exchange, jax.tree.map(lambda g: g[0], draw(0)))
    assert [leaf.shape for leaf in residual.device] == [(4, length) for length in lengths]
    assert [leaf.shape for leaf in residual.split] == [(4, length // 4) for length in lengths]
    errors, servers = ([np.zeros(leaf.shape) for leaf in part] for part in residual[:2])
    reduce = jax.jit(jax.vmap(exchange.reduce, axis_name="d"))
    for seed in range(3):
        grads = draw(seed)
        sums, residual = reduce(grads, residual)
        rows = [np.float64(grads[name]).reshape(4, -1) for name in sorted(SHAPES)]
        rows = rows if per_leaf else [np.concatenate(rows, 1)]
        expected = []
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            padded = np.pad(row, ((0, 0), (0, length - row.shape[1])))
            actual, errors[index], servers[index] = by_hand(padded, errors[index], servers[index])
            expected.append(actual[: row.shape[1]])
        flat = np.concatenate([np.ravel(sums[name][0]) for name in sorted(SHAPES)])
        np.testing.assert_allclose(flat, np.concatenate(expected), rtol=1e-5)
        for leaf in jax.tree.leaves(sums):
            assert (leaf == leaf[:1]).all() and leaf.dtype == jnp.float32
        for index in range(len(lengths)):
            np.testing.assert_allclose(residual.device[index], errors[index], atol=1e-5)
            np.testing.assert_allclose(residual.split[index], servers[index], atol=1e-5)


def test_nothing_is_lost():
    """Received sums plus the errors of devices and servers equal the sums of the gradients."""
    exchange = OneBit(("d",), 4)
    residual = jax.vmap(exchange.init)(draw(0))
    given, received = np.zeros((9, 5)), np.zeros((9, 5))
    reduce = jax.jit(jax.vmap(exchange.reduce, axis_name="d"))
    for seed in range(20):
        sums, residual = reduce(draw(seed), residual)
        given += np.float64(draw(seed)["kernel"]).sum(0)
        received += np.float64(sums["kernel"][0])
    kept = np.float64(residual.device[1]).sum(0) + np.ravel(residual.split[1])
    np.testing.assert_allclose(received + kept[:45].reshape(9, 5), given, atol=1e-4)


@pytest.mark.long
def test_narrow_leaves_keep_their_dtype_and_a_nan_shows():
    exchange = OneBit(("d",), 4)
    grads = {"a": jnp.ones((4, 32), jnp.bfloat16), "b": jnp.ones((4, 3)).at[1, 2].set(jnp.nan)}
    sums, _ = jax.vmap(exchange.reduce, axis_name="d")(grads, jax.vmap(exchange.init)(grads))
    assert sums["a"].dtype == jnp.bfloat16 and (sums["a"] == 4).all()
    assert jnp.isnan(sums["b"]).any()


@pytest.mark.parametrize(
    "options, message", [({"per_leaf": 1}, "^per_leaf"), ({"multiple": 0}, "^multiple")]
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        OneBit(("d",), 4, **options)


def test_rejects_a_multiple():
    with rejected("multiple", 12, "is not a multiple of 8", kind=ArgumentError):
        OneBit(("d",), 4, multiple=12)


def test_complex_numbers_have_no_sign():
    with rejected("name", "onebit", "cannot send complex numbers", kind=ArgumentError):
        OneBit(("d",), 4).init({"a": jnp.ones(3, jnp.complex64)})


@pytest.mark.parametrize(
    "axes, shape", [(("data",), {"data": 8}), (("data", "fsdp"), {"data": 4, "fsdp": 2})]
)
@pytest.mark.parametrize("per_leaf", [True, False])
def test_sent_bytes(per_leaf, axes, shape):
    """A device sends at most 5 % more than a bit per value in each direction, and no float32 array."""
    config = tiny.digits(**{f"mesh__{name}": size for name, size in shape.items()})
    mesh = make_mesh(config.mesh)
    exchange = OneBit(axes, 8, per_leaf=per_leaf)
    leaves = {f"kernel{i}": jax.ShapeDtypeStruct((500, 500), jnp.float32) for i in range(4)}
    leaves |= {f"bias{i}": jax.ShapeDtypeStruct((500,), jnp.float32) for i in range(4)}
    values = sum(leaf.size for leaf in leaves.values())
    text = over.program(exchange, mesh, leaves)
    sent = wire_bytes(text)
    dense = 2 * 4 * values * 7 // 8  # an all-reduce in float32
    assert sent["u8"] < 1.05 * dense / 32
    assert set(sent) == {"u8"}  # scales are bytes after the signs
    types = {(one.kind, one.dtype) for one in traffic.collectives(text)}
    assert types == {("all-to-all", "u8"), ("all-gather", "u8")}


@pytest.mark.long
def test_devices_of_a_mesh_are_those_of_a_batch_axis():
    """The exchange over two mesh axes gives the results of vmap, so chunks are in device order."""
    config = tiny.digits(mesh__data=2, mesh__fsdp=2)
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    exchange = OneBit(("data", "fsdp"), 4)
    grads, spec = draw(0), PartitionSpec(("data", "fsdp"))
    residual = jax.vmap(exchange.init)(grads)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def on_mesh(grads, residual):
        one = functools.partial(jax.tree.map, lambda leaf: leaf[0])
        actual = exchange.reduce(one(grads), one(residual))
        return jax.tree.map(lambda leaf: leaf[None], actual)

    expected = jax.vmap(OneBit(("d",), 4).reduce, axis_name="d")(grads, residual)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
        jax.jit(on_mesh)(grads, residual),
        expected,
    )
