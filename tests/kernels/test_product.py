"""Tests that the product for CPUs equals that of `jax.lax`, and that other devices use JAX's gradients."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lamb_tpu.kernels.product import dot_general
from tests.kernels.sharing import check_shared_kernel

SHAPES = [(5,), (3, 5), (4, 3, 5), (2, 4, 3, 5)]


def theirs(x: Any, kernel: Any, dtype: Any = None) -> jax.Array:
    return lax.dot_general(
        x, kernel, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype
    )


def ours(x: Any, kernel: Any, dtype: Any = None) -> jax.Array:
    return dot_general(x, kernel, preferred_element_type=dtype)


def inputs(shape: tuple[int, ...], dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=shape).astype(dtype), rng.normal(size=(5, 6)).astype(dtype)


def gradients(product: Any, x: Any, kernel: Any, dtype: Any = None) -> Any:
    def loss(x: Any, kernel: Any) -> jax.Array:
        return jnp.sum(jnp.sin(product(x, kernel, dtype).astype(jnp.float32)))

    return jax.grad(loss, (0, 1))(x, kernel)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    given = inputs(shape)
    np.testing.assert_array_equal(ours(*given), theirs(*given))
    actual, expected = (jax.jit(functools.partial(gradients, f))(*given) for f in (ours, theirs))
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_second_derivatives() -> None:
    given = inputs((4, 3, 5))
    direction = jax.tree.map(np.cos, given)
    actual, expected = (
        jax.jvp(functools.partial(gradients, f), given, direction)[1] for f in (ours, theirs)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected
    )


def test_sums_of_bfloat16_are_of_float32() -> None:
    given = [jnp.asarray(leaf, jnp.bfloat16) for leaf in inputs((4, 3, 5))]
    assert ours(*given, jnp.float32).dtype == jnp.float32 and ours(*given).dtype == jnp.bfloat16
    actual, expected = (gradients(f, *given, jnp.float32) for f in (ours, theirs))
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        # Compare norms: the gradient is rounded before the sums here, and after them in JAX.
        a, b = (np.asarray(leaf, np.float32) for leaf in (a, b))
        assert np.linalg.norm(a - b) < 2**-7 * np.linalg.norm(b)


def test_bfloat16_products_have_fast_dtypes_on_a_cpu() -> None:
    """Tests that both factors are bfloat16 and that sums are float32."""
    given = [jnp.asarray(leaf, jnp.bfloat16) for leaf in inputs((4, 3, 5))]
    for dtype, forward in ((jnp.float32, "f32"), (None, "bf16")):
        traced = jax.jit(functools.partial(gradients, ours, dtype=dtype)).trace(*given)
        lines = [
            line
            for line in traced.lower(lowering_platforms=("cpu",)).as_text().splitlines()
            if "dot_general" in line and "contracting_dims = []" not in line
        ]
        assert len(lines) == 3
        factors = [line.rsplit(": (", 1)[1].split(") -> ")[0].count("bf16") for line in lines]
        assert factors == [2, 2, 2]
        sums = ["xf32>" in line.rsplit(" -> ", 1)[1] for line in lines]
        assert sums == [forward == "f32", True, True]


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernel_that_all_devices_share(check_vma: bool) -> None:

    def slopes(is_ours: bool, *both: Any) -> Any:
        return gradients(ours if is_ours else theirs, *both)

    check_shared_kernel(slopes, *inputs((4, 3, 5)), check_vma, 1e-6)


def test_programs_for_tpus_are_those_of_jax() -> None:
    """Tests that TPU programs have JAX's products, and that CPU programs transpose no kernel gradient."""

    def operations(product: Any, platform: str) -> list[str]:
        traced = jax.jit(functools.partial(gradients, product)).trace(*inputs((4, 3, 5)))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return sorted(
            line.split(" = ", 1)[1].split("%")[0] + line[line.find("contracting") :]
            for line in text.splitlines()
            if "dot_general" in line or "transpose" in line
        )

    assert operations(ours, "tpu") == operations(theirs, "tpu")
    assert any("transpose" in line for line in operations(theirs, "cpu"))
    assert not any("transpose" in line for line in operations(ours, "cpu"))


def test_in_flax() -> None:
    x = inputs((4, 3, 5))[0]
    layers = [nn.Dense(6, dot_general=product) for product in (dot_general, None)]
    variables = layers[0].init(jax.random.key(0), x)
    np.testing.assert_array_equal(*(layer.apply(variables, x) for layer in layers))


def test_unsupported_arguments() -> None:
    x, kernel = inputs((4, 3, 5))
    expected = "needs factors (..., inputs) and (inputs, outputs), and precision=None"
    for change in ({"precision": "highest"}, {"dimension_numbers": (((1,), (0,)), ((), ()))}):
        with pytest.raises(ValueError) as error:
            dot_general(x, kernel, **change)  # type: ignore[arg-type]
        assert expected in str(error.value)
    with pytest.raises(ValueError):
        dot_general(x, kernel[None])
