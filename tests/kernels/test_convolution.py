"""Tests that convolutions for CPUs equal those of `jax.lax`, which other devices use."""

import doctest
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu.kernels import convolution as convolution_lib
from lamb_tpu.kernels.convolution import convolve
from tests.kernels.sharing import check_shared_kernel

ORDER = ("NHWC", "HWIO", "NHWC")
CASES = [  # kernel, strides, padding, groups
    ((3, 3, 4, 5), (1, 1), "SAME", 1),
    ((3, 3, 4, 5), (2, 2), "SAME", 1),
    ((3, 2, 4, 5), (3, 2), "VALID", 1),
    ((7, 7, 4, 5), (2, 2), ((3, 3), (3, 3)), 1),
    ((3, 3, 4, 5), (2, 1), ((0, 2), (3, 1)), 1),
    ((1, 1, 4, 5), (1, 1), "SAME", 1),
    ((1, 1, 4, 5), (2, 2), ((0, 0), (0, 0)), 1),
    ((1, 1, 4, 5), (2, 2), ((1, 1), (1, 1)), 1),
    ((3, 3, 4, 5), (3, 3), "SAME", 1),
    ((9, 7, 4, 5), (1, 1), "VALID", 1),
    ((3, 3, 1, 4), (1, 1), "SAME", 4),
    ((3, 3, 1, 4), (2, 2), "SAME", 4),
    ((5, 5, 1, 4), (2, 2), "SAME", 4),
    ((5, 3, 1, 4), (2, 3), "VALID", 4),
    ((3, 3, 1, 4), (3, 3), "VALID", 4),
    ((2, 3, 1, 4), (3, 2), ((2, 1), (0, 3)), 4),
    ((1, 1, 1, 4), (2, 2), ((1, 1), (0, 2)), 4),
    ((3, 3, 1, 8), (1, 1), "SAME", 4),
    ((3, 3, 2, 6), (2, 2), "SAME", 2),
    ((5, 5, 3, 6), (1, 1), "SAME", 1),
    ((3, 2, 3, 16), (1, 1), "VALID", 1),
    ((2, 8, 3, 5), (1, 1), ((0, 1), (0, 0)), 1),
    ((3, 6, 3, 5), (1, 1), ((1, 0), (2, 4)), 1),
]


def theirs(x: Any, kernel: Any, strides: Any, padding: Any, groups: int) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=ORDER, feature_group_count=groups
    )


def ours(x: Any, kernel: Any, strides: Any, padding: Any, groups: int) -> jax.Array:
    return convolve(x, kernel, strides, padding, feature_group_count=groups)


def inputs(kernel: tuple[int, ...], dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    channels = 3 if kernel[2] == 3 else 4
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(3, 9, 8, channels)).astype(dtype),
        rng.normal(size=kernel).astype(dtype),
    )


def gradients(convolution: Any, x: Any, kernel: Any, *how: Any) -> Any:
    def value(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = convolution(x, kernel, *how)
        weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7 - 3
        return jnp.sum(jnp.sin(y) * weights), y

    return jax.grad(value, (0, 1), has_aux=True)(x, kernel)


@pytest.mark.long
@pytest.mark.parametrize("kernel, strides, padding, groups", CASES)
def test_values_and_gradients(kernel: Any, strides: Any, padding: Any, groups: int) -> None:
    with jax.enable_x64(True):
        actual, expected = (
            jax.jit(functools.partial(gradients, convolution), static_argnums=(2, 3, 4))(
                *inputs(kernel), strides, padding, groups
            )
            for convolution in (ours, theirs)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), actual, expected
        )


@pytest.mark.optimized
@pytest.mark.parametrize(
    "kernel, groups", [((3, 3, 4, 5), 1), ((1, 1, 4, 5), 1), ((3, 3, 1, 4), 4), ((3, 3, 3, 5), 1)]
)
@pytest.mark.parametrize("rows", [16, 12])
def test_rows_of_eight_devices_stay_where_they_are(
    rows: int, kernel: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If 16 rows are split over 8 devices, each device sums its own rows; 12 rows are replicated."""
    monkeypatch.setattr(convolution_lib, "_PATCH_BYTES", 1)  # one image at a time
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    how = (1, 1), "SAME", groups
    x, weights = inputs(kernel, np.float32)
    x = np.resize(x, (rows, *x.shape[1:])) * np.arange(1, rows + 1)[:, None, None, None] / rows
    expected = gradients(theirs, x, weights, *how)[0][1]
    rows_split = NamedSharding(mesh, P("data" if rows == 16 else None))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = (
            jax.jit(
                lambda x, kernel: gradients(ours, x, kernel, *how)[0][1],
                in_shardings=(rows_split, NamedSharding(mesh, P())),
            )
            .lower(x, weights)
            .compile()
        )
    assert "all-gather" not in compiled.as_text()
    assert ("all-reduce" in compiled.as_text()) == (rows == 16)
    np.testing.assert_allclose(compiled(x, weights), expected, rtol=2e-5, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "kernel", [(3, 3, 4, 5), (3, 3, 1, 4), (1, 1, 4, 5), (9, 8, 4, 5), (3, 3, 3, 5)]
)
def test_sums_of_bfloat16_are_of_float32(kernel: Any) -> None:
    x, weights = (jnp.asarray(a, jnp.bfloat16) for a in inputs(kernel))
    how = (1, 1), "VALID" if kernel[0] == 9 else "SAME", 4 if kernel[2] == 1 else 1
    actual = jax.jit(functools.partial(gradients, ours), static_argnums=(2, 3, 4))(x, weights, *how)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(actual))
    exact = theirs(*(a.astype(jnp.float32) for a in (x, weights)), *how)
    np.testing.assert_allclose(actual[1].astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    "kernel, groups", [((3, 3, 4, 5), 1), ((3, 3, 1, 4), 4), ((3, 3, 3, 5), 1)]
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_kernel_that_all_devices_share(check_vma: bool, kernel: Any, groups: int) -> None:
    strides = (1, 1) if kernel[2] == 3 else (2, 2)  # with wide pixels, and without
    x, weights = inputs(kernel, np.float32)

    def slopes(is_ours: bool, *both: Any) -> Any:
        return gradients(ours if is_ours else theirs, *both, strides, "SAME", groups)[0]

    check_shared_kernel(slopes, np.concatenate([x, x[::-1]])[:4], weights, check_vma, 2e-5)


@pytest.mark.parametrize(
    "kernel, strides, groups",
    [((3, 3, 4, 5), (2, 2), 1), ((3, 3, 1, 4), (2, 2), 4), ((3, 3, 3, 5), (1, 1), 1)],
)
def test_programs_for_tpus_are_those_of_jax(kernel: Any, strides: Any, groups: int) -> None:
    """Compares the convolutions in our program with those in JAX's program."""

    def operations(convolution: Any, platform: str) -> list[str]:
        traced = jax.jit(functools.partial(gradients, convolution), static_argnums=(2, 3, 4)).trace(
            *inputs(kernel, np.float32), strides, "SAME", groups
        )
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        # The order of operations and the calls of inner functions may differ.
        return sorted(
            line.split(" = ", 1)[1].split("%")[0] + line[line.find("dim_numbers") :]
            for line in text.splitlines()
            if "stablehlo.conv" in line and "convert" not in line
        )

    assert operations(ours, "tpu") == operations(theirs, "tpu")
    assert len(operations(ours, "tpu")) == 3
    assert operations(ours, "cpu") != operations(theirs, "cpu")


def test_in_flax() -> None:
    x = inputs((3, 3, 4, 5), np.float32)[0]
    layers = [
        nn.Conv(5, (3, 3), 2, padding=1, conv_general_dilated=convolution)
        for convolution in (convolve, None)
    ]
    variables = layers[0].init(jax.random.key(0), x)
    actual, expected = (layer.apply(variables, x) for layer in layers)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"rhs_dilation": (2, 2)},
        {"lhs_dilation": (1, 2)},
        {"precision": "highest"},
        {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ],
)
def test_unsupported_arguments(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs NHWC images, dilations of 1, and precision=None"):
        convolve(*inputs((3, 3, 4, 5), np.float32), (1, 1), "SAME", **change)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(convolution_lib) == (0, 1)


@pytest.mark.parametrize("groups", [1, 4])
def test_which_are_fast_in_loops(groups: int) -> None:
    kernel = (3, 3, 1, 4) if groups == 4 else (3, 3, 4, 5)

    def text(convolution: Any) -> str:
        def loss(*both: Any) -> jax.Array:
            return jnp.sum(convolution(*both, (2, 2), "SAME", groups) ** 2)

        return jax.jit(jax.grad(loss, (0, 1))).lower(*inputs(kernel)).as_text()

    assert convolution_lib.are_fast_in_loops(text(ours))
    assert not convolution_lib.are_fast_in_loops(text(theirs))
    assert convolution_lib.are_fast_in_loops(jax.jit(jnp.dot).lower(1.0, 2.0).as_text())
