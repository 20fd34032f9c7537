"""Tests that operations on packed examples give the same numbers as on separate examples."""

import doctest
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lamb_tpu.kernels import lanes as packing
from lamb_tpu.kernels.lanes import Conv, examples_a_row, pack, unpack

INIT = nn.initializers.normal(1.0)


def test_where_the_examples_lie() -> None:
    x = np.random.default_rng(0).normal(size=(6, 4, 5, 3)).astype(np.float32)
    packed = np.asarray(pack(x, 2))
    assert packed.shape == (3, 4, 5, 6)
    for example in range(6):
        first = 3 * (example % 2)
        np.testing.assert_array_equal(packed[example // 2, ..., first : first + 3], x[example])
    np.testing.assert_array_equal(unpack(packed, 2), x)
    np.testing.assert_array_equal(packed.reshape(6, -1)[0, :3], x[0, 0, 0])
    means = np.mean(packed, (1, 2)).reshape(6, 3)
    np.testing.assert_allclose(means, x.mean((1, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "depthwise, size, stride", [(False, 1, 1), (False, 3, 2), (True, 3, 1), (True, 5, 2)]
)
def test_convolution_is_that_of_flax(depthwise: bool, size: int, stride: int) -> None:
    channels = 3 if depthwise else 5
    theirs = nn.Conv(
        channels,
        (size, size),
        stride,
        "SAME",
        feature_group_count=3 if depthwise else 1,
        use_bias=False,
        kernel_init=INIT,
    )
    x = np.random.default_rng(0).normal(size=(4, 6, 7, 3)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=(4, 7, 7, channels)).astype(np.float32)

    def layer(packed: int) -> Conv:
        return Conv(channels, size, stride, "float32", INIT, depthwise, packed)

    def ours(packed: int, variables: Any, x: jax.Array) -> jax.Array:
        return unpack(layer(packed).apply(variables, pack(x, packed)), packed)

    def value(apply: Any, variables: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = apply(variables, x)
        return jnp.sum(y * weights[:, : y.shape[1], : y.shape[2]]), y

    @jax.jit
    def run(x: jax.Array) -> Any:
        variables = theirs.init(jax.random.key(0), x)
        drawn = layer(4).init(jax.random.key(0), pack(x, 4))
        every = [theirs.apply, *(functools.partial(ours, packed) for packed in (1, 2, 4))]
        gradients = [
            jax.grad(functools.partial(value, apply), (0, 1), has_aux=True)(variables, x)
            for apply in every
        ]
        return variables, drawn, gradients

    variables, drawn, (expected, *actual) = run(x)
    jax.tree.map(np.testing.assert_array_equal, drawn, variables)
    for each in actual:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), each, expected)


def test_dtype_is_that_of_the_computation() -> None:
    layer = Conv(5, 1, 1, "bfloat16", INIT, packed=2)
    x = jnp.ones((2, 3, 3, 8))
    y, variables = layer.init_with_output(jax.random.key(0), x)
    assert y.dtype == jnp.bfloat16
    assert variables["params"]["kernel"].dtype == jnp.float32


def test_padding_at_stride_2() -> None:
    """Detects the padding with a convolution of ones: sums are lower where pixels were padded."""
    for size, kernel, expected in (
        (5, 3, [2, 3, 2]),
        (6, 3, [3, 3, 2]),
        (7, 5, [3, 5, 5, 3]),
        (6, 5, [4, 5, 3]),
    ):
        layer = Conv(1, kernel, 2, "float32", INIT)
        row = np.ones((1, size, size, 1), np.float32)
        params = {"kernel": np.ones((kernel, kernel, 1, 1), np.float32)}
        actual = np.asarray(layer.apply({"params": params}, row))[0, :, :, 0]
        np.testing.assert_array_equal(actual, np.outer(expected, expected))


def fitting(kind: AxisType, device: str, rows: int) -> int:
    """Returns `examples_a_row` for a network that sees `rows` rows, in a program for 2 devices."""
    mesh = AbstractMesh(
        (2,),
        ("data",),
        (AxisType.Auto,),
        abstract_device=AbstractDevice(device, 1, platform=device),
    )
    actual = []

    def network(x: jax.Array) -> jax.Array:
        actual.append(examples_a_row(len(x)))
        return x

    if kind == AxisType.Manual:
        network = jax.shard_map(network, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        rows *= 2
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(network, jax.ShapeDtypeStruct((rows,), jnp.float32))
    return actual[0]


def test_packed_where_a_tpu_only_sees_its_rows() -> None:
    manual, auto = AxisType.Manual, AxisType.Auto
    rows = (1, 4, 8, 16, 24, 32, 36, 96, 128)
    assert [fitting(manual, "tpu", n) for n in rows] == [1, 1, 1, 2, 1, 4, 1, 4, 4]
    assert fitting(manual, "cpu", 32) == fitting(manual, "gpu", 32) == 1
    assert fitting(auto, "tpu", 32) == examples_a_row(32) == 1


def test_docstrings() -> None:
    result = doctest.testmod(packing)
    assert result.failed == 0
    assert result.attempted >= 1
