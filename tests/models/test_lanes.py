"""Packed examples: the same numbers in another place."""

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

from lamb_tpu.models import lanes as packing
from lamb_tpu.models.lanes import Conv, examples_a_row, pack, unpack
from tests.quick import jit

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

    def ours(packed: int, variables: Any, x: jax.Array) -> jax.Array:
        layer = Conv(channels, size, stride, "float32", INIT, depthwise, packed)
        return unpack(layer.apply(variables, pack(x, packed)), packed)

    def value(apply: Any, variables: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = apply(variables, x)
        return jnp.sum(y * weights[:, : y.shape[1], : y.shape[2]]), y

    @jit
    def run(x: jax.Array) -> Any:
        variables = theirs.init(jax.random.key(0), x)
        layer = Conv(channels, size, stride, "float32", INIT, depthwise, 4)
        drawn = layer.init(jax.random.key(0), pack(x, 4))
        return (
            variables,
            drawn,
            [
                jax.grad(functools.partial(value, apply), (0, 1), has_aux=True)(variables, x)
                for apply in (
                    theirs.apply,
                    *(functools.partial(ours, packed) for packed in (1, 2, 4)),
                )
            ],
        )

    variables, drawn, (expected, *found) = run(x)
    jax.tree.map(np.testing.assert_array_equal, drawn, variables)
    for each in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), each, expected)


def test_dtype_is_that_of_the_computation() -> None:
    layer = Conv(5, 1, 1, "bfloat16", INIT, packed=2)
    x = jnp.ones((2, 3, 3, 8))
    y, variables = layer.init_with_output(jax.random.key(0), x)
    assert y.dtype == jnp.bfloat16
    assert variables["params"]["kernel"].dtype == jnp.float32


def test_padding_at_stride_2() -> None:
    """Finds the padding by a convolution of ones: what is missing at an end was padded there."""
    for size, kernel, expected in (
        (5, 3, [2, 3, 2]),
        (6, 3, [3, 3, 2]),
        (7, 5, [3, 5, 5, 3]),
        (6, 5, [4, 5, 3]),
    ):
        layer = Conv(1, kernel, 2, "float32", INIT)
        row = np.ones((1, size, size, 1), np.float32)
        params = {"kernel": np.ones((kernel, kernel, 1, 1), np.float32)}
        found = np.asarray(layer.apply({"params": params}, row))[0, :, :, 0]
        np.testing.assert_array_equal(found, np.outer(expected, expected))


def fitting(kind: AxisType, device: str, rows: int) -> int:
    """Returns the packing of a network that sees `rows` in a program for 2 devices."""
    mesh = AbstractMesh(
        (2,),
        ("data",),
        (AxisType.Auto,),
        abstract_device=AbstractDevice(device, 1, platform=device),
    )
    found = []

    def network(x: jax.Array) -> jax.Array:
        found.append(examples_a_row(len(x)))
        return x

    if kind == AxisType.Manual:
        network = jax.shard_map(network, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        rows *= 2
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(network, jax.ShapeDtypeStruct((rows,), jnp.float32))
    return found[0]


def test_packed_where_a_device_of_a_tpu_sees_its_own_rows() -> None:
    manual, auto = AxisType.Manual, AxisType.Auto
    assert fitting(manual, "tpu", 32) == fitting(manual, "tpu", 96) == 4
    assert fitting(manual, "tpu", 16) == 2
    assert fitting(manual, "tpu", 8) == fitting(manual, "tpu", 1) == 1
    assert fitting(manual, "cpu", 32) == fitting(manual, "gpu", 32) == 1
    assert fitting(auto, "tpu", 32) == examples_a_row(32) == 1


def test_docstrings() -> None:
    result = doctest.testmod(packing)
    assert result.failed == 0
    assert result.attempted >= 2
