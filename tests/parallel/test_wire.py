"""Tests `wire_bytes`, which counts the bytes that a compiled program sends, by dtype."""

import doctest

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny
from tests.parallel import wire

pytestmark = pytest.mark.optimized


def test_example() -> None:
    assert doctest.testmod(wire).attempted and not doctest.testmod(wire).failed


def test_bytes_of_each_dtype() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        packed = (x > 0).astype(jnp.uint8)
        return lax.psum(x, "data"), lax.all_gather(packed, "data", tiled=True)

    mapped = jax.shard_map(
        function,
        mesh=make_mesh(tiny.digits().mesh),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    compiled = jax.jit(mapped).lower(jnp.zeros(8 * 64)).compile()
    assert wire.wire_bytes(compiled) == {"f32": 2 * 4 * 64 * 7 // 8, "u8": 64 * 7}
