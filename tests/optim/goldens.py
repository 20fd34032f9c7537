"""Trajectories recorded from other implementations, and the run that must repeat them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.shared import shared

EXCLUDED = "bias|LayerNorm"
RULES = {
    "all": "all",
    "no decay, no ratio": [(EXCLUDED, {"decay": False, "adapt": False}), ("", {})],
    "no decay": [(EXCLUDED, {"decay": False}), ("", {})],
    "no ratio anywhere": [("", {"adapt": False})],
}


def load(family: str, implementation: str, setting: str) -> tuple[dict, dict, dict]:
    """The index's hyper-parameters, the recorded arrays, and the inputs."""
    golden = shared("golden")
    index = json.loads((golden / "index.json").read_text())
    entry = next(
        entry for entry in index["files"]
        if (entry["family"], entry["implementation"], entry["setting"])
        == (family, implementation, setting)
    )
    return (
        dict(entry["hyper"], float64=entry["float64"]),
        dict(np.load(golden / entry["file"])),
        dict(np.load(golden / "inputs.npz")),
    )


def rate(record: dict):
    """The recorded learning rates as a schedule."""
    return lambda count: jnp.asarray(record["lr"])[count]


def check(tx, record: dict, inputs: dict, float64: bool, skip: tuple[str, ...] = ()):
    """Asserts that `tx` repeats the record at every update: 2e-6, and 1e-12 in float64."""
    _check(tx, record, inputs, "float32", range(1, 21), record, "p32/", 2e-6, skip)
    if float64:
        steps = {int(step): row for row, step in enumerate(record["f64_steps"])}
        with jax.enable_x64(True):
            _check(tx, record, inputs, "float64", steps, steps, "p64/", 1e-12, skip)


def _check(tx, record, inputs, dtype, checked, rows, prefix, tolerance, skip):
    names = [name.removeprefix("param/") for name in inputs if name.startswith("param/")]
    params = {name: jnp.asarray(inputs["param/" + name], dtype) for name in names}
    state = tx.init(params)
    for step in range(1, 21):
        grads = {name: jnp.asarray(inputs["wgrad/" + name][0, step - 1], dtype) for name in names}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if step not in checked:
            continue
        row = step if dtype == "float32" else rows[step]
        for name in names:
            if name not in skip:
                np.testing.assert_allclose(
                    params[name], record[prefix + name][row], rtol=0, atol=tolerance,
                    err_msg=f"{name} after update {step} in {dtype}",
                )
