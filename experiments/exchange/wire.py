"""The least that a device must send for each exchange, beside what its program sends."""

from collections.abc import Mapping
from typing import Any

from experiments.exchange.programs import METHODS

Row = Mapping[str, Any]
_WORD = 4  # bytes of a float32, and of an index


def least(row: Row) -> float:
    """Returns the least bytes that a device sends by the method of a program over all devices.

    A sum over n devices sends 2 (n - 1) / n of its bytes, and a gather n - 1 times its own.
    """
    fields, count = METHODS[row["method"]], row["devices"]
    sizes, ranks = row["sizes"], row["ranks"]
    to_all, summed = count - 1, 2 * (count - 1) / count
    vectors = _WORD * sum(size for size, rank in zip(sizes, ranks, strict=True) if rank < 2)
    matrices = [size for size, rank in zip(sizes, ranks, strict=True) if rank > 1]
    if fields["name"] == "float32":
        return summed * _WORD * sum(sizes)
    if fields["name"] == "bfloat16":
        return summed * 2 * sum(sizes)
    if fields["name"] == "aps":
        # Besides codes, the exponent of each array.
        bits = 1 + fields["exponent_bits"] + fields["mantissa_bits"]
        return summed * (bits / 8 * sum(sizes) + _WORD * len(sizes))
    if fields["name"] == "onebit":
        # Besides signs, a scale of each array, of each device and of each chunk.
        return summed * sum(sizes) / 8 + 2 * to_all * _WORD * len(sizes)
    if fields["name"] == "dgc":
        # Values and indices; vectors stay whole.
        return to_all * 2 * _WORD * fields["ratio"] * sum(matrices) + summed * vectors
    if fields["name"] == "powersgd":
        # Two factors of each matrix; what is not worth factors stays whole.
        factors = sum(
            layers * min(fields["rank"], rows, columns) * (rows + columns)
            for _, layers, rows, columns in row["factors"]
        )
        sent = {index for index, *_ in row["factors"]}
        rest = sum(size for index, size in enumerate(sizes) if index not in sent)
        return summed * _WORD * (factors + rest)
    raise KeyError(fields["name"])


def sent(row: Row) -> int:
    """Returns the bytes that a device sends."""
    return sum(row["sent"].values())


def wide_share(row: Row) -> float:
    """Returns the float32 bytes that a device sends as a share of those of the whole gradient."""
    count = row["devices"]
    return row["sent"].get("f32", 0) / (2 * (count - 1) / count * _WORD * sum(row["sizes"]))
