"""TFDS split syntax: `train`, `train[:1000]`, `train[10%:]`, `train[:50%]+test`."""

import re
from collections.abc import Mapping

from lamb_tpu.errors import UserError, listed, unreadable


def slices(dataset: str, split: str, lengths: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Returns the ranges `(name, start, stop)` of a split, in order.

    `lengths` has the number of examples of each known split. Only simple splits are parsed here;
    TFDS parses the others. Raises a UserError if the set has no such split, or if the split is empty.
    """
    if (simple := _simple(split, lengths)) is not None:
        return [simple]
    try:
        from tensorflow_datasets.core import splits as tfds_splits
    except ModuleNotFoundError as error:
        problem = f"needs the package {error.name}, which is not installed"
        remedy = f"install the extra train: pip install '.[train]', or use {listed(lengths)}"
        raise UserError(f"split {split!r} of data set {dataset}", ..., problem, remedy) from error
    # To resolve a split, TFDS needs only the lengths.
    infos = {
        name: tfds_splits.SplitInfo(name=name, shard_lengths=[length], num_bytes=0)
        for name, length in lengths.items()
    }
    try:
        tfds_ranges = tfds_splits.AbstractSplit.from_spec(split).to_absolute(infos)
    # TFDS recurses for each '+', so thousands of ranges exceed Python's recursion limit.
    except (ValueError, NotImplementedError, RecursionError) as error:
        has = ", ".join(f"{name} ({length:,} examples)" for name, length in lengths.items())
        raise unreadable(
            f"split {split[:200]!r} of data set {dataset}",
            error,
            f"use {has} or slices such as 'train[:1000]' or 'train[10%:]'",
            "is not valid",
        ) from error
    ranges = [
        (part.splitname, part.from_ or 0, lengths[part.splitname] if part.to is None else part.to)
        for part in tfds_ranges
    ]
    if not any(stop > start for _, start, stop in ranges):
        problem = "holds no example"
        raise UserError(f"split {split!r} of data set {dataset}", ..., problem, "use another split")
    return ranges


def _simple(split: str, lengths: Mapping[str, int]) -> tuple[str, int, int] | None:
    """Returns the range of a split such as `train` or `train[:1000]`; None for any other split.

    Most splits have this form, and importing TFDS for them would take a third of a second.
    """
    match = re.fullmatch(r"(\w+)(?:\[([0-9]{0,15}):([0-9]{0,15})\])?", split, re.ASCII)
    if match is None or match[1] not in lengths or match[2] == match[3] == "":
        return None
    start, stop = int(match[2] or 0), int(match[3] or lengths[match[1]])
    return (match[1], start, stop) if start < stop <= lengths[match[1]] else None
