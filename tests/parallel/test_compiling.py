"""Tests the compiler options on a CPU, on other devices, and for an XLA that lacks the option."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from lamb_tpu.parallel import compiling

pytestmark = pytest.mark.optimized


def mesh_of(device: object) -> Mesh:
    return types.SimpleNamespace(devices=np.array([device], object))


def test_no_convolution_goes_to_ynnpack() -> None:
    options = compiling.compiler_options(mesh_of(jax.devices()[0]))
    assert options is not None
    x, kernel = jnp.ones((64, 14, 14, 32)), jnp.ones((3, 3, 32, 64))

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        order = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=order)

    def text(options: dict[str, str] | None) -> str:
        return jax.jit(convolve, compiler_options=options).lower(x, kernel).compile().as_text()

    assert "ynn_fusion" in text(None) and "ynn_fusion" not in text(options)


def test_products_and_sums_stay_as_they_are() -> None:
    options = compiling.compiler_options(mesh_of(jax.devices()[0]))
    x = jax.random.normal(jax.random.key(0), (256, 256))
    for function in (lambda x: x @ x, lambda x: (x * x).sum(0)):
        plain, with_options = (
            jax.jit(function, compiler_options=given)(x) for given in (None, options)
        )
        np.testing.assert_array_equal(plain, with_options)


def test_other_devices_have_none() -> None:
    assert compiling.compiler_options(mesh_of(types.SimpleNamespace(platform="tpu"))) is None


def test_version_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_OPTIONS_OF_CPU", {"xla_of_another_version": "1"})
    compiling._are_known.cache_clear()
    try:
        assert compiling.compiler_options(mesh_of(jax.devices()[0])) is None
    finally:
        compiling._are_known.cache_clear()
