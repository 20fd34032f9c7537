"""The minimum number of bytes that a device must send in an exchange, and the number that it sends."""

from collections.abc import Mapping
from typing import Any

from experiments.exchange.programs import METHODS

Row = Mapping[str, Any]
_WORD = 4  # bytes of a float32 or an index


def least(row: Row) -> float:
    """Returns the minimum number of bytes that a device must send in an exchange among all devices.

    An all-reduce over n devices sends 2 (n - 1) / n of its bytes, and an all-gather n - 1 times its
    input.
    """
    fields, count = METHODS[row["method"]], row["devices"]
    values, vectors = row["values"], row["vector_values"]
    to_all, summed = count - 1, 2 * (count - 1) / count
    if fields["name"] == "float32":
        return summed * _WORD * values
    if fields["name"] == "bfloat16":
        return summed * 2 * values
    if fields["name"] == "aps":
        # Codes, and the exponent of each array.
        bits = 1 + fields["exponent_bits"] + fields["mantissa_bits"]
        return summed * (bits / 8 * values + _WORD * row["arrays"])
    if fields["name"] == "onebit":
        # Signs, and a scale for each array, device and chunk.
        return summed * values / 8 + 2 * to_all * _WORD * row["arrays"]
    if fields["name"] == "dgc":
        # Values and indices; vectors are sent dense.
        sparse = 2 * _WORD * fields["ratio"] * (values - vectors)
        return to_all * sparse + summed * _WORD * vectors
    if fields["name"] == "powersgd":
        # Two factors of each matrix; an array is sent dense if its factors would not be smaller.
        return summed * _WORD * (row["factor_values"] + row["unfactored_values"])
    raise KeyError(fields["name"])


def sent(row: Row) -> int:
    """Returns the bytes that a device sends."""
    return sum(row["sent"].values())


def wide_share(row: Row) -> float:
    """Returns the bytes that a device sends as float32, relative to those in a float32 exchange."""
    count = row["devices"]
    return row["sent"].get("f32", 0) / (2 * (count - 1) / count * _WORD * row["values"])
