"""Tests exchanges that cast: split and replicated sums over devices, and empty residuals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.optim import parameters
from lamb_tpu.parallel.exchange import Residual, make_exchange
from lamb_tpu.parallel.layout import make_layout
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny

DEVICES = 8
SHAPES = {"kernel": (16, 24), "bias": (5,)}  # 5 is not divisible by 8 devices


def exchanged(name: str, optimizer_state: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the result of the exchange, and the sums of the gradients in float64."""
    rng = np.random.default_rng(0)
    grads = {
        name: rng.normal(size=(DEVICES, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    mesh = make_mesh(tiny.digits().mesh)
    metadata = parameters.resolve(params, "all")
    layout = make_layout(params, mesh, metadata, optimizer_state=optimizer_state)
    exchange = make_exchange(layout, name)

    def reduce(own: Any) -> Any:
        residual = exchange.init(params)
        sums, residual = exchange.reduce(jax.tree.map(lambda leaf: leaf[0], own), residual)
        assert residual == Residual()
        return sums

    specs = jax.tree.map(lambda sharding: sharding.spec, layout.moments)
    actual = jax.jit(
        jax.shard_map(
            reduce, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=specs, check_vma=False
        )
    )(grads)
    return actual, {name: np.float64(value).sum(0) for name, value in grads.items()}


@pytest.mark.parametrize("optimizer_state", ["replicated", "zero1"])
@pytest.mark.parametrize("name, rtol", [("float32", 1e-6), ("bfloat16", 2**-6)])
def test_sums_over_devices(name: str, rtol: float, optimizer_state: str) -> None:
    actual, expected = exchanged(name, optimizer_state)
    for leaf, sums in expected.items():
        assert actual[leaf].shape == SHAPES[leaf] and actual[leaf].dtype == jnp.float32
        np.testing.assert_allclose(actual[leaf], sums, rtol=rtol, atol=4 * rtol)
    if optimizer_state == "zero1":
        assert actual["kernel"].sharding.spec != PartitionSpec()
    if name != "float32":  # values were sent in fewer bits
        assert not np.allclose(actual["kernel"], expected["kernel"], rtol=1e-6, atol=1e-6)
