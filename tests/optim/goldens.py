"""Trajectories recorded from other implementations, and the run that must repeat them."""

import functools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.shared import ROOT, shared

FAMILIES = ("lamb", "lars", "novograd", "diffgrad", "rmsprop_tf")


def entries() -> list[dict[str, Any]]:
    """The entries of every family; none where the shared folder is absent."""
    folder = pathlib.Path(os.environ.get("LAMB_TPU_SHARED", ROOT.parent / "shared"))
    path = folder / "golden" / "index.json"
    return json.loads(path.read_text())["files"] if path.exists() else []


def index() -> list[dict[str, Any]]:
    """The entries of the optimizers' families."""
    return [entry for entry in entries() if entry["family"] in FAMILIES]


def label(entry: dict[str, Any]) -> str:
    """A name for an entry: family, implementation and setting."""
    return f"{entry['family']}-{entry['implementation']}-{entry['setting']}"


@functools.cache
def inputs() -> dict[str, np.ndarray]:
    """The initial values and gradients of the recorded runs."""
    return dict(np.load(shared("golden", "inputs.npz")))


def params(dtype: str = "float32") -> dict[str, jax.Array]:
    """The initial values of the recorded runs."""
    return {
        name.removeprefix("param/"): jnp.asarray(value, dtype)
        for name, value in inputs().items() if name.startswith("param/")
    }


def record(entry: dict[str, Any]) -> dict[str, np.ndarray]:
    """The recorded arrays."""
    return dict(np.load(shared("golden", entry["file"])))


def largest_difference(
    tx: optax.GradientTransformation, entry: dict[str, Any], dtype: str = "float32"
) -> dict[str, float]:
    """The largest absolute difference from the record over all updates, by parameter.

    float32 is compared at each of the 20 updates, float64 at those that are stored.
    """
    recorded = record(entry)
    prefix, steps = "p32/", {step: step for step in range(1, 21)}
    if dtype == "float64":
        prefix = "p64/"
        steps = {int(step): row for row, step in enumerate(recorded["f64_steps"])}
    largest = {}
    with jax.enable_x64(dtype == "float64"):
        values = params(dtype)
        names = [name for name in values if prefix + name in recorded]
        assert names, f"{label(entry)} has no arrays {prefix}*"
        largest = dict.fromkeys(names, 0.0)
        state = tx.init(values)

        @jax.jit
        def update(grads, state, values):
            updates, state = tx.update(grads, state, values)
            return optax.apply_updates(values, updates), state

        for step in range(1, 21):
            grads = {name: inputs()["wgrad/" + name][0, step - 1].astype(dtype) for name in values}
            values, state = update(grads, state, values)
            if step in steps:
                for name in names:
                    wanted = recorded[prefix + name][steps[step]]
                    found = np.abs(np.asarray(values[name], np.float64) - wanted).max()
                    largest[name] = float(np.maximum(largest[name], found))  # keeps NaN
    return largest
