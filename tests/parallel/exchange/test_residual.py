"""Tests the residual as a part of the state: its initial value, and a change of the number of devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.optim import parameters
from lamb_tpu.parallel.components import Update
from lamb_tpu.parallel.exchange import Residual, make_exchange
from lamb_tpu.parallel.exchange.error_feedback import EF21
from lamb_tpu.parallel.exchange.onebit import OneBit
from lamb_tpu.parallel.exchange.residual import ResidualComponent
from lamb_tpu.parallel.layout import make_layout
from lamb_tpu.parallel.mesh import make_mesh
from lamb_tpu.parallel.state import with_shardings
from tests import tiny
from tests.parallel.exchange.spread import Spread
from tests.raising import rejected

SHAPES = {"kernel": (4, 6), "bias": (5,)}
SIZE = 29


def part(
    num_devices: int, fsdp: int = 1, exchange: Any = Spread, **options: Any
) -> ResidualComponent:
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    mesh = make_mesh(tiny.digits(mesh__fsdp=fsdp).mesh, jax.devices()[:num_devices])
    layout = make_layout(params, mesh, parameters.resolve(params, "all"))
    return ResidualComponent(make_exchange(layout, exchange, options), params)


def begun(part: ResidualComponent) -> Any:
    return jax.jit(lambda: part.init(part.params, {}))()


def filled(part: ResidualComponent) -> Any:
    """Returns a residual with distinct values."""
    rng = np.random.default_rng(1)
    value = begun(part)
    places = part.shardings(value, part.exchange.layout)

    def random(leaf: jax.Array) -> np.ndarray:
        if leaf.dtype == jnp.int32:
            return np.full(leaf.shape, 3, np.int32)
        return rng.normal(size=leaf.shape).astype(np.float32)

    kept = jax.tree.map(random, value["kept"])
    split = kept.split
    if part.exchange.inner is None:  # one long vector, padded with zeros
        split = np.pad(split.ravel()[:SIZE], (0, split.size - SIZE)).reshape(split.shape)
    return jax.device_put({**value, "kept": kept._replace(split=split)}, places)


def read(there: ResidualComponent, here: ResidualComponent, value: Any) -> Any:
    """Reads the component's value from a checkpoint of `there`, and resumes it with `here`."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), value)
    shapes["kept"] = shapes["kept"]._asdict()  # Orbax returns a named tuple as a dict
    own = jax.eval_shape(lambda: here.init(here.params, {}))
    own = with_shardings(own, here.shardings(own, here.exchange.layout))
    wanted = here.saved(own, shapes)
    placed = jax.tree.map(
        lambda leaf, like: jax.device_put(np.asarray(leaf), like.sharding), value, wanted
    )
    assert jax.tree.map(jnp.shape, placed) == jax.tree.map(jnp.shape, value)
    actual = here.resumed(placed)
    assert jax.tree.map(jnp.shape, actual) == jax.tree.map(jnp.shape, own)
    for leaf, like in zip(jax.tree.leaves(actual), jax.tree.leaves(own), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    return actual


def test_starts_empty_and_split_over_the_devices() -> None:
    of_eight = part(8)
    value = begun(of_eight)
    assert value["devices"].tolist() == [8, 1]
    assert value["kept"].device["kernel"].shape == (8 * 4, 6)
    assert value["kept"].device["bias"].shape == (8 * 5,) and value["kept"].split.shape == (8 * 4,)
    places = of_eight.shardings(value, of_eight.exchange.layout)
    assert places["kept"].device["bias"].spec == PartitionSpec(("data",))
    assert places["kept"].whole["count"].spec == PartitionSpec()
    # With an inner axis, the exchange sees shards, and `whole` has an axis over inner devices.
    of_two = part(8, fsdp=4)
    kept = begun(of_two)["kept"]
    assert kept.device["kernel"].shape == (8 * 1, 6) and kept.device["bias"].shape == (8 * 2,)
    assert kept.whole["count"].shape == (4,)


def test_update_replaces_it_and_replicated_leaves_are_compared() -> None:
    of_eight = part(8)
    value = begun(of_eight)
    new = Residual({}, (), {"count": 5})
    after = of_eight.updated(value, Update(jnp.int32(0), {}, {}, None, {}, new))
    assert after["kept"] is new and of_eight.copied(after) == {"count": 5}


@pytest.mark.parametrize("before, now", [(8, 4), (4, 8), (8, 3)])
def test_padding_is_that_of_the_devices_there_are_now(before: int, now: int) -> None:
    """Vectors of `onebit` are padded to full bytes for each device, so the padding changes."""
    there, here = part(before, exchange=OneBit), part(now, exchange=OneBit)
    value = begun(there)
    rng = np.random.default_rng(2)
    kept = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), value["kept"])
    old, new = kept.device, read(there, here, {**value, "kept": kept})["kept"].device
    sizes = [5, 24]  # bias and kernel
    for size, was, leaf in zip(sizes, old, new, strict=True):
        was, leaf = was.reshape(before, -1), leaf.reshape(now, -1)
        assert was.shape[1] != leaf.shape[1]
        np.testing.assert_allclose(np.sum(leaf, 0)[:size], np.sum(was, 0)[:size], atol=1e-5)


@pytest.mark.parametrize("now", [8, 4, 2, 1, 3])
@pytest.mark.parametrize("before", [8, 4])
def test_other_devices_get_the_same_sum(before: int, now: int) -> None:
    there, here = part(before), part(now)
    value = filled(there)
    actual = read(there, here, value)
    tell = here.moved(value)
    if before == now:
        assert not tell
        tiny.assert_equal(actual, value)
        return
    assert f"for {before} devices" in tell and f"gradients between {now}:" in tell
    assert actual["devices"].tolist() == [now, 1]
    for name in SHAPES:
        old = np.float64(value["kept"].device[name]).reshape(before, *SHAPES[name])
        leaf = actual["kept"].device[name].reshape(now, *SHAPES[name])
        np.testing.assert_allclose(np.sum(leaf, 0), old.sum(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(leaf, np.stack([old.sum(0) / now] * now), rtol=1e-5, atol=1e-6)
    long, new = np.ravel(value["kept"].split), np.ravel(actual["kept"].split)
    assert long[:SIZE].tolist() == new[:SIZE].tolist() and np.all(long[:SIZE])
    assert not new[SIZE:].any()
    tiny.assert_equal(actual["kept"].whole, value["kept"].whole)


def test_inner_axis_stays() -> None:
    there, here = part(8, fsdp=2), part(4, fsdp=2)
    value = filled(there)
    actual = read(there, here, value)
    assert actual["devices"].tolist() == [2, 2]
    for name in SHAPES:
        # Compare the sums over the outer axis, for each inner device.
        old = np.asarray(value["kept"].device[name])
        old = old.reshape(4, 2, -1, *old.shape[1:]).sum(0)
        new = np.asarray(actual["kept"].device[name])
        np.testing.assert_allclose(
            new.reshape(2, 2, -1, *new.shape[1:]).sum(0), old, rtol=1e-5, atol=1e-6
        )
    tiny.assert_equal(actual["kept"].whole, value["kept"].whole)
    with rejected("config.mesh.fsdp", 4, "differs from the 2", "use 2, and"):
        other = part(8, fsdp=4)
        other.resumed(value)


def test_rejects_another_number_of_devices() -> None:
    """EF21+ stores the estimates of every device on every device, not their sum."""
    there, here = part(8, 1, EF21, plus=True), part(4, 1, EF21, plus=True)
    tiny.assert_equal(read(there, there, begun(there)), begun(there))
    with rejected("the number of devices", 4, "differs from 8", "resume with 8 devices"):
        read(there, here, begun(there))


def test_a_skipped_update_restores_counts() -> None:
    """If the count advanced but the average stayed 0, the first gradient would have a weight of 0.1."""
    averaging = part(8, 1, EF21, momentum=0.9)
    value = begun(averaging)
    after = jax.tree.map(lambda x: x + 1, value)
    tiny.assert_equal(averaging.skipped(value, after), value)
