"""Checks exchanges that lose information by their promise: nothing of a gradient is lost for good.

With plain SGD, an update shows the sum that arrived: the change of the parameters divided by minus
the learning rate. With error feedback, this sum plus the change of the devices' residuals is the
gradient of the full batch, also after a resume on another number of devices.
"""

from typing import Any

import jax
import numpy as np

from tests.fuzz import families
from tests.fuzz.case import Case
from tests.fuzz.comparing import LIMIT, Difference
from tests.fuzz.oracle import Oracle
from tests.fuzz.running import Arrays, Leg

# Exchanges whose residual, summed over devices, has the order of the parameters.
NAMES = ("ef14", "topk", "onebit")
_EPS = float(np.finfo(np.float32).eps)


def is_lossy(case: Case) -> bool:
    """Returns whether a case is compared by its promise and not by its trajectory."""
    return case.config.get("parallel.exchange", {}).get("name") in NAMES


def compare(oracle: Oracle, legs: dict[str, Leg]) -> list[Difference]:
    """Compares each update of both legs; all updates must be saved."""
    found = []
    for name, leg in legs.items():
        # The second leg continues from a checkpoint of the first.
        before = None if name == "first" else legs["first"].states[families.SAVED]
        for update, after in sorted(leg.states.items()):
            found.append(
                _update(oracle, f"{name} update {update}", before, after, oracle.rates[update - 1])
            )
            before = after
    return found


def _update(
    oracle: Oracle, name: str, before: Arrays | None, after: Arrays, rate: float
) -> Difference:
    number = int(after[".step"])
    state = oracle.state if before is None else _with(oracle.state, before)
    old, new = _vector(before, state), _vector(after, state)
    _, sums = oracle.gradient(state, number - 1)
    gradient = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(sums)])
    sizes = [leaf.size for leaf in jax.tree.leaves(sums)]
    residuals = [_residual(arrays, sizes) for arrays in (before, after)]
    arrived = (old - new) / rate + residuals[1] - residuals[0]
    gap = float(np.linalg.norm(arrived - gradient))
    norms = [float(np.linalg.norm(each)) for each in (old / rate, *residuals, gradient)]
    what = f"{name}: sum that arrived plus the residuals"
    return Difference(what, LIMIT * gap / (LIMIT * _EPS * sum(norms)), gap, 0.0)


def _with(state: Any, arrays: Arrays) -> Any:
    """Returns the oracle's state with the parameters and the model state of a leg."""

    def taken(prefix: str, tree: Any) -> Any:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        return treedef.unflatten(
            [arrays[f"{prefix}{jax.tree_util.keystr(path)}"] for path, _ in leaves]
        )

    return state.replace(
        params=taken(".params", state.params),
        model_state=taken(".model_state", state.model_state),
        step=arrays[".step"],
    )


def _vector(arrays: Arrays | None, state: Any) -> np.ndarray:
    """Returns all parameters as one vector in float64, those of `state` if there are no arrays."""
    leaves = jax.tree.leaves(state.params)
    if arrays is not None:
        leaves = [value for name, value in arrays.items() if name.startswith(".params")]
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])


def _residual(arrays: Arrays | None, sizes: list[int]) -> np.ndarray:
    """Returns the sum over devices of the residuals, in the order of the parameters.

    A residual is a vector for each parameter or one for all of them; both end with padding.
    """
    total = np.zeros(sum(sizes))
    for kind in (".device", ".split"):
        kept = f".residual['kept']{kind}"
        found = [value for name, value in (arrays or {}).items() if name.startswith(kept)]
        if not found:
            continue
        devices = int(np.prod(arrays[".residual['devices']"])) if kind == ".device" else 1
        lengths = sizes if len(found) == len(sizes) else [sum(sizes)]
        each = [
            np.asarray(value, np.float64).reshape(devices, -1).sum(0)[:length]
            for value, length in zip(found, lengths, strict=True)
        ]
        total += np.concatenate(each)
    return total
