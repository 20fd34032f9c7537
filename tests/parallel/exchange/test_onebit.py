"""One bit a value: its packing, its error feedback, and what a compiled program sends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.cost import traffic
from lamb_tpu.parallel.exchange.onebit import OneBit, pack, unpack
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny
from tests.parallel.wire import wire_bytes

SHAPES = {"kernel": (9, 5), "bias": (7,), "scalar": ()}


def draw(seed, shapes=None, devices=4):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal((devices, *shape)), jnp.float32)
        for name, shape in (shapes or SHAPES).items()
    }


def compressed(values):
    """A vector of signs and one scale, and what they leave out."""
    scale = np.sqrt(np.mean(values**2))
    found = np.where(values >= 0, scale, -scale)
    return found, values - found


def by_hand(flat, errors, server):
    """The sum of rows, padded already; all arrays are float64."""
    sent, errors = zip(*map(compressed, flat + errors))
    chunks = sum(sent).reshape(len(flat), -1) + server
    found, server = zip(*map(compressed, chunks))
    return np.concatenate(found), np.stack(errors), np.stack(server)


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
    residual = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * 4), exchange.init(jax.tree.map(lambda g: g[0], draw(0)))
    )
    assert [leaf.shape for leaf in residual.device] == [(4, length) for length in lengths]
    assert [leaf.shape for leaf in residual.split] == [(4, length // 4) for length in lengths]
    errors, servers = ([np.zeros(leaf.shape) for leaf in part] for part in residual[:2])
    for seed in range(3):
        grads = draw(seed)
        sums, residual = jax.jit(jax.vmap(exchange.reduce, axis_name="d"))(grads, residual)
        rows = [np.float64(grads[name]).reshape(4, -1) for name in sorted(SHAPES)]
        rows = rows if per_leaf else [np.concatenate(rows, 1)]
        expected = []
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            padded = np.pad(row, ((0, 0), (0, length - row.shape[1])))
            found, errors[index], servers[index] = by_hand(padded, errors[index], servers[index])
            expected.append(found[: row.shape[1]])
        flat = np.concatenate([np.ravel(sums[name][0]) for name in sorted(SHAPES)])
        np.testing.assert_allclose(flat, np.concatenate(expected), rtol=1e-5)
        for leaf in jax.tree.leaves(sums):
            assert (leaf == leaf[:1]).all() and leaf.dtype == jnp.float32
        for index in range(len(lengths)):
            np.testing.assert_allclose(residual.device[index], errors[index], atol=1e-5)
            np.testing.assert_allclose(residual.split[index], servers[index], atol=1e-5)


def test_nothing_is_lost():
    """All that was given is in what was received and in the errors: of devices and servers."""
    exchange = OneBit(("d",), 4)
    residual = jax.vmap(exchange.init)(draw(0))
    given, received = np.zeros((9, 5)), np.zeros((9, 5))
    for seed in range(20):
        sums, residual = jax.jit(jax.vmap(exchange.reduce, axis_name="d"))(draw(seed), residual)
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


def test_a_tree_without_leaves():
    exchange = OneBit(("d",), 4, per_leaf=False)
    assert exchange.reduce({}, exchange.init({}))[0] == {}


@pytest.mark.parametrize(
    "options, said",
    [
        ({"per_leaf": 1}, "per_leaf must be True or False, not 1"),
        ({"multiple": 12}, "multiple must be a multiple of 8, not 12"),
        ({"multiple": 0}, "multiple must be a whole number of at least 8, not 0"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(ValueError, match=said):
        OneBit(("d",), 4, **options)


def test_complex_numbers_have_no_sign():
    with pytest.raises(ValueError, match="sends signs, which complex numbers"):
        OneBit(("d",), 4).init({"a": jnp.ones(3, jnp.complex64)})


@pytest.mark.parametrize(
    "axes, shape", [(("data",), {"data": 8}), (("data", "fsdp"), {"data": 4, "fsdp": 2})]
)
@pytest.mark.parametrize("per_leaf", [True, False])
def test_what_is_sent(per_leaf, axes, shape):
    """At most 5 % more than a bit a value both ways, and nothing large is float32."""
    config = tiny.digits(**{f"mesh__{name}": size for name, size in shape.items()})
    mesh = make_mesh(config.mesh)
    exchange = OneBit(axes, 8, per_leaf=per_leaf)
    leaves = {f"kernel{i}": jax.ShapeDtypeStruct((500, 500), jnp.float32) for i in range(4)}
    leaves |= {f"bias{i}": jax.ShapeDtypeStruct((500,), jnp.float32) for i in range(4)}
    values = sum(leaf.size for leaf in leaves.values())
    residual = jax.eval_shape(lambda: exchange.init(leaves))
    step = jax.jit(
        jax.shard_map(
            exchange.reduce,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    text = step.lower(leaves, residual).compile().as_text()
    sent = wire_bytes(text)
    dense = 2 * 4 * values * 7 // 8  # an all-reduce in float32
    assert sent["u8"] < 1.05 * dense / 32
    assert set(sent) == {"u8"}  # the scales are bytes behind the signs
    kinds = {(one.kind, one.dtype) for one in traffic.collectives(text)}
    assert kinds == {("all-to-all", "u8"), ("all-gather", "u8")}


@pytest.mark.long
def test_devices_of_a_mesh_are_those_of_a_batch_axis():
    """Chunks of the servers are in the order of the devices on any axes."""
    config = tiny.digits(mesh__data=2, mesh__fsdp=2)
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    exchange = OneBit(("data", "fsdp"), 4)
    grads, spec = draw(0), PartitionSpec(("data", "fsdp"))
    residual = jax.vmap(exchange.init)(grads)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def on_mesh(grads, residual):
        one = functools.partial(jax.tree.map, lambda leaf: leaf[0])
        found = exchange.reduce(one(grads), one(residual))
        return jax.tree.map(lambda leaf: leaf[None], found)

    expected = jax.vmap(OneBit(("d",), 4).reduce, axis_name="d")(grads, residual)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
        jax.jit(on_mesh)(grads, residual),
        expected,
    )
