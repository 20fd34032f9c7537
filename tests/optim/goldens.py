"""Trajectories recorded from other implementations, and how far ours are from them."""

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
    """The entries of every family; none where the shared folder is absent."""
    path = folder() / "golden" / "index.json"
    return json.loads(path.read_text())["files"] if path.exists() else []


def index() -> list[dict[str, Any]]:
    """The entries of the optimizers' families."""
    return [entry for entry in entries() if entry["family"] in golden.FAMILIES]


def find(**fields: str) -> dict[str, Any]:
    """The first entry with these values; skips the calling test where the index has none."""
    found = [e for e in entries() if all(e[key] == value for key, value in fields.items())]
    if not found:
        missing(f"the entry {' '.join(fields.values())} in golden/index.json")
    return found[0]


def need(number: int, found: Sequence[dict[str, Any]], what: str) -> None:
    """Skips the calling test where the index has fewer than `number` entries of what it counts."""
    if len(found) < number:
        missing(f"all {number} entries of {what} in golden/index.json")


def label(entry: dict[str, Any]) -> str:
    """A name for an entry: family, implementation and setting."""
    return f"{entry['family']}-{entry['implementation']}-{entry['setting']}"


@functools.cache
def inputs() -> dict[str, np.ndarray]:
    """The initial values and gradients of the recorded runs."""
    return dict(np.load(shared("golden", "inputs.npz")))


def params(dtype: str = "float32") -> dict[str, jax.Array]:
    """The initial values of the recorded runs."""
    return initial(inputs(), dtype)


def record(entry: dict[str, Any]) -> dict[str, np.ndarray]:
    """The recorded arrays."""
    return dict(np.load(shared("golden", entry["file"])))


def largest_differences(entry: dict[str, Any]) -> dict[str, float]:
    """The largest absolute difference from the record over all updates, by recorded key.

    float32 is compared after each of the 20 updates, float64 after those that are stored.

    Raises:
      NotImplementedError: the entry is not repeated here; the message says why.
    """
    recorded = record(entry)
    found = FAMILIES[entry["family"]](entry, recorded, inputs())
    compared = {key for key in recorded if key.startswith(("p32/", "p64/", "eval32/"))}
    assert found.keys() == compared and compared, label(entry)
    # The largest of several numbers is NaN if one of them is.
    return {key: float(np.abs(found[key] - recorded[key]).max()) for key in found}
