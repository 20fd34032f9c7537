"""Compares sums of APS with sums by NumPy and by hand; tests non-finite layers and sent bytes."""

import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import formats
from lamb_tpu.parallel.exchange.aps import Aps
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny
from tests.parallel.exchange import tpu_wire
from tests.raising import rejected

DEVICES = 8
FOUR_BITS = {"exponent_bits": 3, "mantissa_bits": 0}


def gradients(devices: int = DEVICES) -> dict[str, np.ndarray]:
    """Returns gradients of layers with very different magnitudes; no value is near a rounding tie."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (33, 7), "bias": (5,), "scale": (), "far": (3, 1, 2)}
    scales = {"kernel": 1e-3, "bias": 30.0, "scale": 1.0, "far": 1e-30}
    return {
        name: (scales[name] * rng.normal(size=(devices, *shape))).astype(np.float32)
        for name, shape in shapes.items()
    }


def reduced(grads: Any, devices: int = DEVICES, **options: Any) -> Any:
    """Returns every device's sums of gradients with a leading axis of devices."""
    exchange = Aps(("device",), devices, **options)

    def one(own: Any) -> Any:
        sums, residual = exchange.reduce(own, exchange.init(own))
        assert residual == Residual()
        return sums

    if not grads:
        return one(grads)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one, axis_name="device"))(grads))


def expected(grads: np.ndarray, **options: Any) -> np.ndarray:
    """Returns the sum over devices in E4M3, computed by NumPy and ml_dtypes."""
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
    actual = reduced(grads, devices, kahan=kahan)
    for name, sums in actual.items():
        assert sums.dtype == np.float32
        np.testing.assert_array_equal(sums, expected(grads[name], kahan=kahan), err_msg=name)


def test_without_the_shift_small_layers_are_lost() -> None:
    grads = gradients()
    actual = reduced(grads, shift=False)
    np.testing.assert_array_equal(actual["bias"], expected(grads["bias"], shift=False))
    assert not actual["far"].any() and expected(grads["far"]).all()
    np.testing.assert_allclose(
        reduced(grads)["far"],
        np.broadcast_to(grads["far"].sum(0), (8, 3, 1, 2)),
        rtol=0.2,
        atol=1e-30,
    )


def test_four_bits_by_hand() -> None:
    """Compares a sum in a format of four bits with the same sum by hand.

    Four times the largest gradient is 12, below 2^4. The format's largest value is 2^3, so the scale
    is 1/2. The values 3, 1, -2, 0.25 become 1.5, 0.5, -1 and 0.125, and are rounded to 2 (1.5 is a
    tie and rounds up), 0.5, -1 and 0 (0.125 is a tie, half of the smallest value). The partial sums
    are 2, 2 (rounded from 2.5), 1 and 1. Scaled back, the result is 2.
    """
    grads = {"x": np.float32([[3], [1], [-2], [0.25]])}
    np.testing.assert_array_equal(reduced(grads, 4, **FOUR_BITS)["x"], np.full((4, 1), 2.0))


def test_devices_are_added_in_their_order() -> None:
    """With a 3-bit mantissa the order matters: 16 + 1 = 17 rounds to 16, but 7 + 16 = 23 rounds to 24."""
    grads = np.float32([16, *[1] * 7])[:, None]
    assert reduced({"x": grads})["x"][0, 0] == 16
    assert reduced({"x": grads[::-1].copy()})["x"][0, 0] == 24


@pytest.mark.parametrize("axes, shape", [(("data",), (8,)), (("data", "fsdp"), (2, 4))])
def test_inside_shard_map_over_axes(axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Sums over one or two mesh axes equal those by NumPy, even if chunks are padded to full rows."""
    grads = gradients() | {
        "large": np.random.default_rng(1).normal(size=(DEVICES, 20_011)).astype(np.float32)
    }
    mesh = Mesh(np.array(jax.devices()).reshape(shape), axes)
    exchange = Aps(axes, DEVICES)

    def one(own: Any) -> Any:
        sums = exchange.reduce(jax.tree.map(lambda leaf: leaf[0], own), Residual())[0]
        return jax.tree.map(lambda leaf: leaf[None], sums)

    every = PartitionSpec(axes)
    actual = jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    )(grads)
    for name, sums in actual.items():
        np.testing.assert_array_equal(sums, expected(grads[name]), err_msg=name)


@pytest.mark.parametrize("options", [{}, FOUR_BITS, {"kahan": True}])
def test_layers_without_numbers(options: dict[str, Any]) -> None:
    """A layer of zeros stays zero; infinity or NaN on one device makes a layer NaN on all devices."""
    grads = {name: np.ones((4, 3), np.float32) for name in ("ones", "inf", "nan")}
    grads["zero"] = np.zeros((4, 3), np.float32)
    grads["tiny"] = np.full((4, 3), 1e-42, np.float32)
    grads["empty"] = np.zeros((4, 0), np.float32)
    grads["inf"][2, 1], grads["nan"][3, 0] = -np.inf, np.nan
    actual = reduced(grads, 4, **options)
    np.testing.assert_array_equal(actual["ones"], np.full((4, 3), 4.0))
    assert not actual["zero"].any() and not actual["tiny"].any() and actual["empty"].shape == (4, 0)
    assert not np.isfinite(actual["inf"]).any() and not np.isfinite(actual["nan"]).any()
    plain = reduced(grads, 4, shift=False, **options)
    assert not np.isfinite(plain["inf"][:, 1]).any() and not np.isfinite(plain["nan"][:, 0]).any()


@pytest.mark.parametrize("scale", [1e-37, 1e30])
def test_a_shift_may_be_larger_than_float32s_exponents(scale: float) -> None:
    """For gradients of 1e-37, the scale for E5M2 is 2^137, which exceeds the range of float32."""
    grads = (scale * np.float32([[1.0, 0.5], [1.0, -0.25]])).astype(np.float32)
    actual = reduced({"x": grads}, 2, exponent_bits=5, mantissa_bits=2)["x"][0]
    np.testing.assert_allclose(actual, grads.sum(0), rtol=0.15)


@pytest.mark.parametrize("fields", [(3, 0), (2, 1), (4, 3), (5, 2), (5, 10)])
def test_a_shifted_sum_does_not_overflow(fields: tuple[int, int]) -> None:
    """Tests the largest values that the shift allows, on 1 to 300 devices.

    A sum grows with each of its terms, so no other values give a larger sum.
    """
    fmt = formats.Format(*fields)
    largest = np.float32(2.0**fmt.largest_exponent)

    @jax.jit
    def sums(counts: jax.Array) -> jax.Array:
        terms = formats.cast(largest / counts, fmt)
        rows = jnp.where(jnp.arange(300)[:, None] < counts, terms, 0)
        return formats.sequential_sum(rows, fmt)

    actual = sums(jnp.arange(1, 301, dtype=jnp.float32))
    assert actual.max() < 2 * largest and actual[0] == largest


def test_all_of_float32_is_a_plain_sum() -> None:
    grads = gradients()
    actual = reduced(grads, exponent_bits=8, mantissa_bits=23)
    for name, sums in actual.items():
        np.testing.assert_allclose(sums[0], grads[name].sum(0), rtol=1e-5, atol=1e-36)


def test_leaves_keep_their_dtype() -> None:
    grads = {"x": jnp.ones((4, 3), jnp.bfloat16)}
    actual = reduced(grads, 4)["x"]
    assert actual.dtype == jnp.bfloat16 and (actual == 4).all()
    assert reduced({}, 4) == {}


def test_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the number of buckets."""
    grads = gradients()
    one = reduced(grads)
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 4 * 8)
    for name, sums in reduced(grads).items():
        np.testing.assert_array_equal(sums, one[name])


@pytest.mark.parametrize(
    "key, value", [("exponent_bits", 9), ("exponent_bits", 1), ("mantissa_bits", 24)]
)
def test_rejected_arguments(key: str, value: int) -> None:
    with rejected(key, value, "is out of range", kind=ArgumentError):
        Aps(("data",), 8, **{key: value})


def check_wire(report: dict[str, Any], num_devices: int, share: float) -> None:
    """Checks that devices send only words, at most 5 % more than a `share` of float32's bytes."""
    sent = dict(report["sent"])
    # The all-reduce of exponents sends one exponent per layer.
    assert sent.pop("s32") <= 2 * 4 * len(tpu_wire.SHAPES), report
    # In float32, a device would send all values twice: in a reduce-scatter and in an all-gather.
    least = share * 2 * 4 * sum(tpu_wire.SIZES) * (num_devices - 1) / num_devices
    assert sent.keys() == {"u32"} and least <= sent["u32"] <= 1.05 * least, report
    assert not any("all-reduce u32" in row for row in report["collectives"])


@pytest.mark.long
@pytest.mark.parametrize(
    "exponent_bits, mantissa_bits, kahan",
    [(4, 3, False), (4, 3, True), (3, 0, False), (5, 10, False), (3, 2, False)],
)
def test_wire(exponent_bits: int, mantissa_bits: int, kahan: bool) -> None:
    exchange = Aps(("data",), DEVICES, exponent_bits, mantissa_bits, kahan=kahan)
    report = tpu_wire.report(make_mesh(tiny.digits().mesh), exchange)
    check_wire(report, DEVICES, exchange.format.bits / 32)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here")
def test_wire_of_tpus() -> None:
    shares = {"aps e4m3": 1 / 4, "aps e3m0": 1 / 8}
    names = ",".join(shares)
    done = tiny.command("tests.parallel.exchange.tpu_wire", names, "v5e-16", "v3-128")
    assert done.returncode == 0, done.stderr
    for name, actual in json.loads(done.stdout).items():
        for form, share in shares.items():
            check_wire(actual[form], int(name.split("-")[1]), share)
