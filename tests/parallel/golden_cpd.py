"""Recorded casts, products and sums of CPD, repeated through `lamb_tpu.parallel.exchange`."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.parallel.exchange import formats
from lamb_tpu.parallel.exchange.aps import Aps
from lamb_tpu.parallel.exchange.formats import Format
from tests.optim.golden_common import Settings

Arrays = Mapping[str, np.ndarray]


def repeat_quant(
    entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays
) -> dict[str, np.ndarray]:
    """Returns our casts or products under the recorded keys, without the arrays that were given."""
    del inputs
    implementation = entry["implementation"]
    if implementation not in _QUANT:
        raise ValueError(f"{implementation!r} of cpd_quant is unknown")
    settings = Settings(entry["hyper"])
    found = _QUANT[implementation](settings, recorded)
    return {key: found[key] for key in recorded if key not in GIVEN}


GIVEN = ("in_bits", "a", "b")


def _casts(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    exponent_bits, mantissa_bits = settings.take("exp_bits"), settings.take("man_bits")
    settings.check_empty("cpd_float_quantize")
    x = recorded["in_bits"].view(np.float32)

    def bits(style: str) -> np.ndarray:
        fmt = Format(exponent_bits, mantissa_bits, style)
        return np.asarray(jax.jit(lambda x: formats.cast(x, fmt))(x)).view(np.uint32)

    stored = recorded["in_bits"] >> 23 & 0xFF
    # Where the kernel shifts a number by 32 or more, which C++ leaves undefined.
    shifts = 128 - Format(exponent_bits, mantissa_bits).bias - stored.astype(int)
    return {
        "cpd_bits": bits("cpd"),
        # The package rounds correctly.
        "mldtypes_bits": bits("ieee"),
        "shift_ge_32": (shifts >= 32) & (stored > 0),
    }


def _product(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    a, b = recorded["a"], recorded["b"]
    rows, inner, columns = (settings.take(name) for name in ("M", "K", "N"))
    settings.check_empty("cpd_quant_gemm")
    if (a.shape, b.shape) != ((rows, inner), (inner, columns)):
        raise ValueError(f"a and b have the shapes {a.shape} and {b.shape}")
    found = {"c_exact": a.astype(np.float64) @ b.astype(np.float64)}
    for key in recorded:
        if match := re.fullmatch(r"c_e(\d+)m(\d+)", key):
            fmt = Format(int(match[1]), int(match[2]), "cpd")
            found[key] = np.asarray(jax.jit(lambda a, b: formats.matmul(a, b, fmt))(a, b))
    return found


_QUANT = {"cpd_float_quantize": _casts, "cpd_quant_gemm": _product}


def repeat_aps(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our sums over devices under the recorded keys."""
    if entry["implementation"] != "cpd_sum_gradients":
        raise ValueError(f"{entry['implementation']!r} of aps is unknown")
    settings = Settings(entry["hyper"])
    world = settings.take("world")
    fmt = Format(settings.take("exp"), settings.take("man"), "cpd")
    shift, kahan = settings.take("use_APS"), settings.take("kahan")
    source = settings.take("gradients")
    settings.check_empty("cpd_sum_gradients")
    steps = re.fullmatch(r"wgrad/<name>\[rank, t\], t = (\d+)\.\.(\d+)", source)
    if not steps:
        raise ValueError(f"gradients {source!r} are unknown")
    rows = slice(int(steps[1]), int(steps[2]) + 1)
    found = {}
    for key in recorded:
        grads = inputs["wgrad/" + key.removeprefix("sum/")][:world, rows]
        found[key] = _shifted(grads, fmt, kahan) if shift else _plain(grads, fmt, kahan)
    return found


def _shifted(grads: np.ndarray, fmt: Format, kahan: bool) -> np.ndarray:
    """Sums (device, step, ...) by the exchange, one step after the other."""
    world = len(grads)
    exchange = Aps(
        ("device",), world, fmt.exponent_bits, fmt.mantissa_bits, shift=True, kahan=kahan
    )

    @jax.jit
    def sums(grads: jax.Array) -> jax.Array:
        one = jax.vmap(lambda own: exchange.reduce(own, exchange.init(own))[0], axis_name="device")
        return one(grads)[0]  # the same on every device

    largest = np.abs(grads).max(axis=(0, *range(2, grads.ndim))) * np.float32(world)
    with np.errstate(divide="ignore"):
        shifts = fmt.largest_exponent - np.ceil(np.log2(largest))
    if (np.isfinite(shifts) & (shifts > 127)).any():
        raise NotImplementedError("2 to the power of the shift overflows there, and sums are NaN")
    found = np.stack([np.asarray(sums(grads[:, step])) for step in range(grads.shape[1])])
    # Where no device has a gradient the reference takes the logarithm of zero, and 0 * inf is NaN.
    # Ours stays zero.
    found[np.isinf(shifts)] = np.nan
    return found


def _plain(grads: np.ndarray, fmt: Format, kahan: bool) -> np.ndarray:
    """Sums over the first axis as the reference does without APS, without a cast before."""
    if fmt.bits == 32 and not kahan:
        return np.asarray(jnp.sum(grads, axis=0))
    add = formats.kahan_sum if kahan else formats.sequential_sum
    return np.asarray(jax.jit(lambda grads: add(grads, fmt))(grads))
