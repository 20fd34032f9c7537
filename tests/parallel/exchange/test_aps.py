"""APS: sums in few bits, by hand and by a loop in NumPy; layers without numbers; what is sent."""

import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.parallel.exchange import aps, formats
from lamb_tpu.parallel.exchange.aps import Aps
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny
from tests.parallel.exchange import aps_wire

DEVICES = 8
FOUR_BITS = {"exponent_bits": 3, "mantissa_bits": 0}


def gradients(devices: int = DEVICES) -> dict[str, np.ndarray]:
    """Layers of very different sizes; values are drawn so that no rounding is near a tie."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (33, 7), "bias": (5,), "scale": (), "far": (3, 1, 2)}
    scales = {"kernel": 1e-3, "bias": 30.0, "scale": 1.0, "far": 1e-30}
    return {
        name: (scales[name] * rng.normal(size=(devices, *shape))).astype(np.float32)
        for name, shape in shapes.items()
    }


def reduced(grads: Any, devices: int = DEVICES, **options: Any) -> Any:
    """Every device's sums, of gradients with a leading axis for devices."""
    exchange = Aps(("device",), devices, **options)

    def one(own: Any) -> Any:
        sums, residual = exchange.reduce(own, exchange.init(own))
        assert residual == Residual()
        return sums

    if not grads:
        return one(grads)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one, axis_name="device"))(grads))


def expected(grads: np.ndarray, **options: Any) -> np.ndarray:
    """The sum of E4M3 by NumPy and ml_dtypes; the same on all devices."""
    exponent = np.ceil(np.log2(np.float64(np.abs(grads).max()) * len(grads)))
    scale = 2.0 ** (7 - exponent) if options.get("shift", True) else 1.0

    def rounded(x: np.ndarray) -> np.ndarray:
        return np.float32(x).astype(ml_dtypes.float8_e4m3).astype(np.float64)

    total = error = np.zeros(grads.shape[1:])
    for own in rounded(np.float64(grads) * scale):
        if options.get("kahan"):
            value = rounded(own - error)
            new = rounded(total + value)
            total, error = new, rounded(rounded(new - total) - value)
        else:
            total = rounded(total + own)
    return np.broadcast_to(np.float32(total / scale), grads.shape)


@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_sums_by_numpy(devices: int, kahan: bool) -> None:
    grads = gradients(devices)
    found = reduced(grads, devices, kahan=kahan)
    for name, sums in found.items():
        assert sums.dtype == np.float32
        np.testing.assert_array_equal(sums, expected(grads[name], kahan=kahan), err_msg=name)


def test_without_the_shift_small_layers_are_lost() -> None:
    grads = gradients()
    found = reduced(grads, shift=False)
    np.testing.assert_array_equal(found["bias"], expected(grads["bias"], shift=False))
    assert not found["far"].any() and expected(grads["far"]).all()
    np.testing.assert_allclose(
        reduced(grads)["far"],
        np.broadcast_to(grads["far"].sum(0), (8, 3, 1, 2)),
        rtol=0.2,
        atol=1e-30,
    )


def test_four_bits_by_hand() -> None:
    """Four times the largest is below 2^4, and a shift by 2^-1 takes that to the range's end, 2^3.

    The values 3, 1, -2, 0.25 become 2 (1.5 is a tie, and goes up), 0.5, -1 and 0 (half of the
    smallest value, 0.25). Their sums are 2, 2 (of 2.5), 1 and 1; shifted back, 2.
    """
    grads = {"x": np.float32([[3], [1], [-2], [0.25]])}
    np.testing.assert_array_equal(reduced(grads, 4, **FOUR_BITS)["x"], np.full((4, 1), 2.0))


def test_devices_are_added_in_their_order() -> None:
    """With three bits 16 + 1 is a tie and stays 16; the tie of 7 + 16 goes to 24."""
    grads = np.float32([16, *[1] * 7])[:, None]
    assert reduced({"x": grads})["x"][0, 0] == 16
    assert reduced({"x": grads[::-1].copy()})["x"][0, 0] == 24


@pytest.mark.parametrize("axes, shape", [(("data",), (8,)), (("data", "fsdp"), (2, 4))])
def test_inside_shard_map_over_axes(axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """On real devices, over one axis or two, as under vmap; chunks of whole rows among them."""
    grads = gradients() | {
        "large": np.random.default_rng(1).normal(size=(DEVICES, 20_011)).astype(np.float32)
    }
    mesh = Mesh(np.array(jax.devices()).reshape(shape), axes)
    exchange = Aps(axes, DEVICES)

    def one(own: Any) -> Any:
        sums = exchange.reduce(jax.tree.map(lambda leaf: leaf[0], own), Residual())[0]
        return jax.tree.map(lambda leaf: leaf[None], sums)

    every = PartitionSpec(axes)
    found = jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    )(grads)
    for name, sums in found.items():
        np.testing.assert_array_equal(sums, expected(grads[name]), err_msg=name)


@pytest.mark.parametrize("options", [{}, FOUR_BITS, {"kahan": True}])
def test_layers_without_numbers(options: dict[str, Any]) -> None:
    """Zero stays zero; infinity or NaN on one device marks its layer on all, and no other."""
    grads = {name: np.ones((4, 3), np.float32) for name in ("ones", "inf", "nan")}
    grads["zero"] = np.zeros((4, 3), np.float32)
    grads["tiny"] = np.full((4, 3), 1e-42, np.float32)
    grads["empty"] = np.zeros((4, 0), np.float32)
    grads["inf"][2, 1], grads["nan"][3, 0] = -np.inf, np.nan
    found = reduced(grads, 4, **options)
    np.testing.assert_array_equal(found["ones"], np.full((4, 3), 4.0))
    assert not found["zero"].any() and not found["tiny"].any() and found["empty"].shape == (4, 0)
    assert not np.isfinite(found["inf"]).any() and not np.isfinite(found["nan"]).any()
    plain = reduced(grads, 4, shift=False, **options)
    assert not np.isfinite(plain["inf"][:, 1]).any() and not np.isfinite(plain["nan"][:, 0]).any()


@pytest.mark.parametrize("scale", [1e-37, 1e30])
def test_a_shift_may_be_larger_than_float32s_exponents(scale: float) -> None:
    """At 1e-37 the shift of E5M2 is 2^137, of which float32 has none."""
    grads = (scale * np.float32([[1.0, 0.5], [1.0, -0.25]])).astype(np.float32)
    found = reduced({"x": grads}, 2, exponent_bits=5, mantissa_bits=2)["x"][0]
    np.testing.assert_allclose(found, grads.sum(0), rtol=0.15)


@pytest.mark.parametrize("fields", [(3, 0), (2, 1), (4, 3), (5, 2), (5, 10)])
def test_a_shifted_sum_does_not_overflow(fields: tuple[int, int]) -> None:
    """The largest values, which the shift allows for, on every number of devices up to 300.

    A sum grows with each of its terms, so no others give a larger one.
    """
    fmt = formats.Format(*fields, "cpd")
    largest = np.float32(2.0**fmt.largest_exponent)

    @jax.jit
    def sums(counts: jax.Array) -> jax.Array:
        terms = formats.cast(largest / counts, fmt)
        rows = jnp.where(jnp.arange(300)[:, None] < counts, terms, 0)
        return formats.sequential_sum(rows, fmt)

    found = sums(jnp.arange(1, 301, dtype=jnp.float32))
    assert found.max() <= fmt.largest and found[0] == largest


def test_all_of_float32_is_a_plain_sum() -> None:
    grads = gradients()
    found = reduced(grads, exponent_bits=8, mantissa_bits=23)
    for name, sums in found.items():
        np.testing.assert_allclose(sums[0], grads[name].sum(0), rtol=1e-5, atol=1e-36)


def test_leaves_keep_their_dtype() -> None:
    grads = {"x": jnp.ones((4, 3), jnp.bfloat16)}
    found = reduced(grads, 4)["x"]
    assert found.dtype == jnp.bfloat16 and (found == 4).all()
    assert reduced({}, 4) == {}


def test_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are the same in many buckets, of which one holds several leaves."""
    grads = gradients()
    one = reduced(grads)
    monkeypatch.setattr(aps, "_BUCKET_VALUES", 8)
    assert aps._buckets([5, 3, 1, 100, 2]) == [[0, 1], [2], [3], [4]]
    for name, sums in reduced(grads).items():
        np.testing.assert_array_equal(sums, one[name])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"exponent_bits": 9}, "exponent_bits must be 2 to 8, not 9"),
        ({"exponent_bits": 1}, "exponent_bits must be 2 to 8, not 1"),
        ({"mantissa_bits": 24}, "mantissa_bits must be 0 to 23, not 24"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Aps(("data",), 8, **options)


def check_wire(report: dict[str, Any], num_devices: int, share: float) -> None:
    """Fails unless words alone are sent, within 5 % of the share of float32's bytes."""
    sent = dict(report["sent"])
    # An exponent of each layer.
    assert sent.pop("s32") <= 2 * 4 * len(aps_wire.SHAPES), report
    least = share * aps_wire.float32_bytes(num_devices)
    assert sent.keys() == {"u32"} and least <= sent["u32"] <= 1.05 * least, report
    assert not any("all-reduce u32" in row for row in report["collectives"])


@pytest.mark.long
@pytest.mark.parametrize(
    "name, share, kahan",
    [
        ("e4m3", 1 / 4, False),
        ("e4m3", 1 / 4, True),
        ("e3m0", 1 / 8, False),
        ("e5m10", 1 / 2, False),
        ("e3m2", 6 / 32, False),
    ],
)
def test_wire(name: str, share: float, kahan: bool) -> None:
    exponent_bits, mantissa_bits = aps_wire.FORMATS[name]
    report = aps_wire.report(
        make_mesh(tiny.digits().mesh),
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        kahan=kahan,
    )
    check_wire(report, DEVICES, share)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here")
def test_wire_of_tpus() -> None:
    done = tiny.command("tests.parallel.exchange.aps_wire", "v5e-16", "v3-128")
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout).items():
        for fmt, share in (("e4m3", 1 / 4), ("e3m0", 1 / 8)):
            check_wire(found[fmt], int(name.split("-")[1]), share)
