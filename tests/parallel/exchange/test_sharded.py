"""Tests an exchange as the step uses it: sums on every layout, and leaves in full precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.optim import parameters
from lamb_tpu.parallel.exchange import BFloat16, Residual, ShardedExchange, make_exchange
from lamb_tpu.parallel.exchange.sharded import any_not_finite
from lamb_tpu.parallel.layout import Layout, make_layout
from lamb_tpu.parallel.mesh import batch_axes, make_mesh
from tests import tiny
from tests.parallel.exchange.spread import Spread
from tests.parallel.wire import wire_bytes

DEVICES = 8
SHAPES = {"a/kernel": (16, 24), "b/bias": (5,), "c/scale": ()}
UPDATES = 3


def layout(rules: Any = (), **changes: Any) -> Layout:
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state = changes.pop("optimizer_state", "replicated")
    mesh = make_mesh(tiny.digits(**changes).mesh)
    return make_layout(params, mesh, parameters.resolve(params, "all"), rules, state)


def gradients() -> dict[str, np.ndarray]:
    """Returns the gradients of all updates and devices, (updates, devices, *shape)."""
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=(UPDATES, DEVICES, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def program(placed: ShardedExchange) -> tuple[Any, Residual]:
    """Returns an exchange as a compiled function of global arrays, and the initial residual."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    residual = jax.jit(lambda: placed.init(params))()
    specs = placed.specs(residual)
    moments = jax.tree.map(lambda sharding: sharding.spec, placed.layout.moments)

    def reduce(own: Any, residual: Residual) -> Any:
        return placed.reduce(jax.tree.map(lambda leaf: leaf[0], own), residual)

    return jax.jit(
        jax.shard_map(
            reduce,
            mesh=placed.layout.mesh,
            out_specs=(moments, specs),
            check_vma=False,
            in_specs=(PartitionSpec(batch_axes(placed.layout.mesh)), specs),
        )
    ), residual


LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero1": {"optimizer_state": "zero1"},
    "fsdp": {"rules": (("kernel", "fsdp"),)},
    "hierarchy": {"mesh__data": 2, "mesh__fsdp": 4},
    "hierarchy zero1": {"mesh__data": 2, "mesh__fsdp": 4, "optimizer_state": "zero1"},
    "hierarchy fsdp": {"mesh__data": 4, "mesh__fsdp": 2, "rules": (("kernel", "fsdp"),)},
    "inner alone": {"mesh__data": 1, "mesh__fsdp": 8, "optimizer_state": "zero1"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_on_every_layout(name: str) -> None:
    placed = make_exchange(layout(**LAYOUTS[name]), Spread, {"start": 1})
    inner = 1 if "hierarchy" not in name else 8 // LAYOUTS[name]["mesh__data"]
    assert placed.sizes == (DEVICES // inner, inner)
    programs = {stage: program(placed.at(stage)) for stage in (0, 1)}
    residual, every = programs[0][1], gradients()
    total = {leaf: np.zeros(shape) for leaf, shape in SHAPES.items()}
    for update in range(UPDATES):
        grads = {leaf: value[update] for leaf, value in every.items()}
        actual, residual = programs[min(update, 1)][0](grads, residual)
        for leaf, value in grads.items():
            expected = np.float64(value).sum(0)
            assert actual[leaf].shape == SHAPES[leaf]
            np.testing.assert_allclose(actual[leaf], expected, rtol=1e-5, atol=1e-5)
            total[leaf] += expected
    if "zero1" in name:
        assert actual["a/kernel"].sharding.spec != PartitionSpec()
    # The amounts that devices withhold differ and sum to zero; chunks have the sums of all updates.
    for leaf in jax.tree.leaves(residual.device):
        rows = leaf.reshape(DEVICES, -1)
        assert np.abs(rows).max() > 0
        np.testing.assert_allclose(np.sum(rows, axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(
        np.sum(residual.split), sum(value.sum() for value in total.values()), rtol=1e-4
    )
    assert np.unique(residual.whole["count"]).tolist() == [UPDATES]
    assert residual.whole["count"].shape == ((inner,) if inner > 1 else ())


def test_inner_devices_send_their_parts_alone() -> None:
    """Gradients are reduce-scattered among 4 inner devices; 2 outer devices exchange each quarter."""
    placed = make_exchange(layout(**LAYOUTS["hierarchy zero1"]), Spread)
    reduce, residual = program(placed)
    grads = {name: value[0] for name, value in gradients().items()}
    sent = wire_bytes(reduce.lower(grads, residual).compile())
    kernel, rest = 4 * 16 * 24, 4 * (8 + 4)  # 5 and 1 values are padded to a multiple of 4
    least = (kernel + rest) * 3 // 4 + (kernel + rest) // 4  # 2 (n - 1) / n is 1 for 2 devices
    gathered = rest * 3 // 4
    assert sent.keys() == {"f32"} and sent["f32"] == least + gathered


@pytest.mark.parametrize("made", [Spread, BFloat16])
@pytest.mark.parametrize("name", ["whole", "hierarchy zero1"])
def test_named_leaves_stay_in_full_precision(name: str, made: Any) -> None:
    placed = make_exchange(layout(**LAYOUTS[name]), made, full_precision=("bias", "scale$"))
    reduce, residual = program(placed)
    grads = {leaf: value[0] for leaf, value in gradients().items()}
    actual, residual = reduce(grads, residual)
    rtol = 1e-5 if made is Spread else 2**-6
    for leaf, value in grads.items():
        wide = leaf != "a/kernel"
        np.testing.assert_allclose(
            actual[leaf],
            np.float64(value).sum(0),
            rtol=1e-5 if wide else rtol,
            atol=1e-5 if wide else 4 * rtol,
        )
    if made is Spread:  # the exchange sees only the kernel
        assert len(jax.tree.leaves(residual.device)) == 1
    else:
        text = reduce.lower(grads, residual).as_text()
        assert "bf16" in text and not np.allclose(
            actual["a/kernel"], grads["a/kernel"].sum(0), rtol=1e-6, atol=1e-6
        )


def test_full_precision_finds_nnx_paths() -> None:
    params = {"a": {"kernel": {"value": jnp.zeros((16, 24))}, "bias": {"value": jnp.zeros(24)}}}
    mesh = make_mesh(tiny.digits().mesh)
    whole = make_layout(params, mesh, parameters.resolve(params, "all"), (), "replicated")
    placed = make_exchange(whole, Spread, full_precision=("bias$",))
    (sent,) = jax.tree.leaves(placed.init(params).device)
    assert sent.size == 8 * 16 * 24


def test_one_element_that_is_not_finite_is_found_on_all_devices() -> None:
    made = layout(mesh__data=2, mesh__fsdp=4)
    axes = batch_axes(made.mesh)
    actual = jax.jit(
        jax.shard_map(
            lambda x: any_not_finite({"a": x, "b": jnp.ones(2)}, axes)[None],
            mesh=made.mesh,
            in_specs=PartitionSpec(axes),
            out_specs=PartitionSpec(axes),
            check_vma=False,
        )
    )
    grads = np.ones((8, 3), np.float32)
    assert actual(grads).tolist() == [False] * 8
    grads[5, 1] = np.inf
    assert actual(grads).tolist() == [True] * 8
