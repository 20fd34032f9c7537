"""Trajectories recorded from other implementations, and our differences from them."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tests.golden_families import FAMILIES, initial
from tests.optim import golden
from tests.shared import folder, missing, shared


def entries() -> list[dict[str, Any]]:
    """Returns the entries of all families; an empty list if there is no shared folder."""
    path = folder() / "golden" / "index.json"
    return json.loads(path.read_text())["files"] if path.exists() else []


def index() -> list[dict[str, Any]]:
    """Returns the entries of all families of optimizers."""
    return [entry for entry in entries() if entry["family"] in golden.FAMILIES]


def find(**fields: str) -> dict[str, Any]:
    """Returns the first entry with these values; skips the calling test if there is none."""
    actual = [e for e in entries() if all(e[key] == value for key, value in fields.items())]
    if not actual:
        missing(f"the entry {' '.join(fields.values())} in golden/index.json")
    return actual[0]


def need(number: int, actual: Sequence[Any], what: str) -> None:
    """Skips the calling test if `actual`, a list of index entries, has fewer than `number` elements."""
    if len(actual) < number:
        missing(f"all {number} entries of {what} in golden/index.json")


def label(entry: dict[str, Any]) -> str:
    return f"{entry['family']}-{entry['implementation']}-{entry['setting']}"


@functools.cache
def inputs() -> dict[str, np.ndarray]:
    """Returns the initial values and gradients of the recorded runs."""
    return dict(np.load(shared("golden", "inputs.npz")))


def params(dtype: str = "float32") -> dict[str, jax.Array]:
    """Returns the initial values of the recorded runs."""
    return initial(inputs(), dtype)


def record(entry: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the recorded arrays."""
    return dict(np.load(shared("golden", entry["file"])))


def largest_differences(entry: dict[str, Any]) -> dict[str, float]:
    """Returns the largest absolute difference from the record over all updates, by recorded key.

    float32 is compared after each of the 20 updates, float64 after the stored updates.

    Raises:
      NotImplementedError: the entry is not reproduced; the message has the reason.
    """
    recorded = record(entry)
    actual = FAMILIES[entry["family"]](entry, recorded, inputs())
    compared = {key for key in recorded if key.startswith(("p32/", "p64/", "eval32/"))}
    assert actual.keys() == compared and compared, label(entry)
    # Unlike max(), np.max returns NaN if any number is NaN.
    return {key: float(np.abs(actual[key] - recorded[key]).max()) for key in actual}
