"""Recorded casts, products and sums of CPD, recomputed with `lamb_tpu.parallel.exchange`."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lamb_tpu.parallel.exchange import formats
from lamb_tpu.parallel.exchange.aps import Aps
from lamb_tpu.parallel.exchange.formats import Format
from tests.optim.golden_common import Settings

Arrays = Mapping[str, np.ndarray]


def repeat_quant(
    entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays
) -> dict[str, np.ndarray]:
    """Returns our casts or products under the keys of the record, without the record's inputs."""
    del inputs
    implementation = entry["implementation"]
    if implementation not in _QUANT:
        raise ValueError(f"implementation={implementation!r} must be a key of _QUANT")
    settings = Settings(entry["hyper"])
    actual = _QUANT[implementation](settings, recorded)
    return {key: actual[key] for key in recorded if key not in GIVEN}


GIVEN = ("in_bits", "a", "b")
# Formats of `ml_dtypes` whose largest exponent encodes infinity and NaN, by (exponent, mantissa) bits.
IEEE = {
    (3, 4): ml_dtypes.float8_e3m4,
    (4, 3): ml_dtypes.float8_e4m3,
    (5, 2): ml_dtypes.float8_e5m2,
    (8, 7): ml_dtypes.bfloat16,
    (5, 10): np.float16,
}


def _casts(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    exponent_bits, mantissa_bits = settings.take("exp_bits"), settings.take("man_bits")
    settings.check_empty("cpd_float_quantize")
    x = recorded["in_bits"].view(np.float32)

    fmt = Format(exponent_bits, mantissa_bits)
    stored = recorded["in_bits"] >> 23 & 0xFF
    # CPD's kernel shifts some numbers by 32 bits or more, which is undefined in C++.
    shifts = 128 - fmt.bias - stored.astype(int)
    actual = {
        "cpd_bits": np.asarray(formats.cast(x, fmt)).view(np.uint32),
        "shift_ge_32": (shifts >= 32) & (stored > 0),
    }
    if "mldtypes_bits" in recorded:  # rounded correctly, which our cast does not do
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = x.astype(IEEE[exponent_bits, mantissa_bits]).astype(np.float32)
        actual["mldtypes_bits"] = rounded.view(np.uint32)
    return actual


def _product(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    a, b = recorded["a"], recorded["b"]
    rows, inner, columns = (settings.take(name) for name in ("M", "K", "N"))
    settings.check_empty("cpd_quant_gemm")
    if (a.shape, b.shape) != ((rows, inner), (inner, columns)):
        raise ValueError(f"a and b must be (M, K) and (K, N), but are {a.shape} and {b.shape}")
    actual = {"c_exact": a.astype(np.float64) @ b.astype(np.float64)}
    for key in recorded:
        if match := re.fullmatch(r"c_e(\d+)m(\d+)", key):
            actual[key] = np.asarray(multiplied(a, b, Format(int(match[1]), int(match[2]))))
    return actual


@functools.partial(jax.jit, static_argnames="fmt")
def multiplied(a: jax.Array, b: jax.Array, fmt: Format) -> jax.Array:
    """Multiplies matrices like CPD: casts each product of numbers, then uses Kahan summation."""
    return formats.kahan_sum(
        (a.T, b), fmt, lambda term: formats.cast(term[0][:, None] * term[1][None, :], fmt)
    )


_QUANT = {"cpd_float_quantize": _casts, "cpd_quant_gemm": _product}


def repeat_aps(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our sums over devices under the keys of the record."""
    if entry["implementation"] != "cpd_sum_gradients":
        raise ValueError(f"implementation={entry['implementation']!r} must be 'cpd_sum_gradients'")
    settings = Settings(entry["hyper"])
    world = settings.take("world")
    fmt = Format(settings.take("exp"), settings.take("man"))
    shift, kahan = settings.take("use_APS"), settings.take("kahan")
    source = settings.take("gradients")
    settings.check_empty("cpd_sum_gradients")
    steps = re.fullmatch(r"wgrad/<name>\[rank, t\], t = (\d+)\.\.(\d+)", source)
    if not steps:
        raise ValueError(f"gradients={source!r} must end with 't = FIRST..LAST'")
    rows = slice(int(steps[1]), int(steps[2]) + 1)
    actual = {}
    for key in recorded:
        grads = inputs["wgrad/" + key.removeprefix("sum/")][:world, rows]
        actual[key] = _shifted(grads, fmt, kahan) if shift else _plain(grads, fmt, kahan)
    return actual


def _shifted(grads: np.ndarray, fmt: Format, kahan: bool) -> np.ndarray:
    """Sums gradients (device, step, ...) over devices with the exchange, one step after the other."""
    world = len(grads)
    exchange = Aps(
        ("device",), world, fmt.exponent_bits, fmt.mantissa_bits, shift=True, kahan=kahan
    )

    @jax.jit
    def sums(grads: jax.Array) -> jax.Array:
        one = jax.vmap(lambda own: exchange.reduce(own, exchange.init(own))[0], axis_name="device")
        return one(grads)[0]  # equal on all devices

    largest = np.abs(grads).max(axis=(0, *range(2, grads.ndim))) * np.float32(world)
    with np.errstate(divide="ignore"):
        shifts = fmt.largest_exponent - np.ceil(np.log2(largest))
    if (np.isfinite(shifts) & (shifts > 127)).any():
        raise NotImplementedError(
            "2 to the power of the shift overflows in CPD, so CPD's sums are NaN"
        )
    actual = np.stack([np.asarray(sums(grads[:, step])) for step in range(grads.shape[1])])
    # If all gradients are zero, CPD takes the logarithm of zero, and its sums are 0 * inf = NaN. Our
    # sums are zero.
    actual[np.isinf(shifts)] = np.nan
    return actual


def _plain(grads: np.ndarray, fmt: Format, kahan: bool) -> np.ndarray:
    """Sums over the first axis like CPD without APS, which does not cast the terms."""
    if fmt.bits == 32 and not kahan:
        return np.asarray(jnp.sum(grads, axis=0))
    add = formats.kahan_sum if kahan else formats.sequential_sum
    return np.asarray(jax.jit(lambda grads: add(grads, fmt))(grads))
