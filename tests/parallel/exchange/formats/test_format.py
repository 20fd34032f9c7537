"""A format's range, by its published figures, and what it refuses."""

from typing import Any

import ml_dtypes
import pytest

from lamb_tpu.parallel.exchange.formats import E2M1FN, E3M0, E4M3, E4M3FN, E5M2, Format

# Those of the package `ml_dtypes` by its own names.
NAMED = {
    "float8_e5m2": E5M2,
    "float8_e4m3": E4M3,
    "float8_e4m3fn": E4M3FN,
    "float8_e3m4": Format(3, 4),
    "float6_e2m3fn": Format(2, 3, "finite"),
    "float6_e3m2fn": Format(3, 2, "finite"),
    "float4_e2m1fn": E2M1FN,
    "bfloat16": Format(8, 7),
    "float16": Format(5, 10),
}


@pytest.mark.parametrize("name", NAMED)
def test_range_of_known_formats(name: str) -> None:
    fmt = NAMED[name]
    info = ml_dtypes.finfo(getattr(ml_dtypes, name, name))
    assert (fmt.bits, fmt.largest) == (info.bits, float(info.max))
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.step == float(info.smallest_subnormal)
    assert str(fmt) in name or fmt.bits == 16


def test_four_bits() -> None:
    """By hand: exponents -2 to 3, bias 3, and nothing between zero and 2^-2."""
    assert (E3M0.bits, E3M0.largest, E3M0.smallest_normal, E3M0.step) == (4, 8, 0.25, 0.25)
    assert Format(3, 0, "finite").largest == 16


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 3), "exponent_bits must be 1 to 8, not 0"),
        ((9, 3), "exponent_bits must be 1 to 8, not 9"),
        ((4, 24), "mantissa_bits must be 0 to 23, not 24"),
        ((4, -1), "mantissa_bits must be 0 to 23, not -1"),
        ((4, 0, "fn"), "mantissa_bits must be 1 to 23, not 0"),
        ((4, 3, "fnuz"), "style must be one of ieee, fn, finite, cpd, not 'fnuz'"),
        ((8, 3, "fn"), "exponent_bits must be at most 7 in the style 'fn'"),
    ],
)
def test_what_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Format(*arguments)
