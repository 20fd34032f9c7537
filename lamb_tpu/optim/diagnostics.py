"""Reads second moments and, with `collect=True`, trust ratios and norms from optimizer states."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from lamb_tpu.optim import checks, parameters
from lamb_tpu.optim.trust_ratio import Diagnostics

QUANTITIES = Diagnostics._fields


def second_moments(opt_state: optax.OptState) -> Any:
    """Returns the field `nu` of an optimizer's state; None if there is not exactly one such field.

    LAMB, Adam and most of Optax's optimizers store their second moments in this field.
    """
    checks.check_opt_state(opt_state)
    try:
        return optax.tree_utils.tree_get(opt_state, "nu")
    except KeyError:  # there are several fields `nu`
        return None


def read(opt_state: optax.OptState) -> dict[str, dict[str, np.ndarray]]:
    """Reads trust ratios, update norms and weight norms from any optimizer's state.

    The state may belong to a chain, `optax.partition`, `optax.MultiSteps` or a similar transform
    that contains the optimizer. If several transforms collect, the result has the values of all of
    them.

    >>> import jax.numpy as jnp
    >>> from lamb_tpu import optim
    >>> tx = optim.lamb(0.1, weight_decay=0.0, collect=True)
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> _, state = tx.update({'kernel': jnp.array([1., 1.])}, tx.init(params), params)
    >>> {name: round(float(values['kernel']), 4) for name, values in read(state).items()}
    {'ratios': 3.5355, 'update_norms': 0.5, 'weight_norms': 5.0}

    Returns:
      {'ratios': {path: value}, 'update_norms': ..., 'weight_norms': ...}. A value is a float32
      array with the shape of the parameter's layer axes: () or (num_layers,). If no transform
      collects, the result is empty.
    """
    checks.check_opt_state(opt_state)
    collected = [
        state
        for state in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Diagnostics))
        if isinstance(state, Diagnostics)
    ]
    quantities: dict[str, dict[str, np.ndarray]] = {}
    for diagnostics in jax.device_get(collected):  # one transfer for all
        for name in QUANTITIES:
            tree = getattr(diagnostics, name)
            values = dict(zip(parameters.leaf_paths(tree), jax.tree.leaves(tree), strict=True))
            quantities.setdefault(name, {}).update(values)
    return quantities


def summary(opt_state: optax.OptState, metadata: parameters.PyTree) -> dict[str, float]:
    """Returns the smallest, median and largest trust ratio of all layers that adapt.

    `metadata` comes from `parameters.resolve`. The names are `ratio_min`, `ratio_median` and
    `ratio_max`. Each layer of a stack counts separately. If the state has no trust ratio of a layer
    that adapts, the result is empty.
    """
    paths, leaves = parameters.leaf_paths(metadata), jax.tree.leaves(metadata)
    # `jax.tree.leaves(None)` is empty, so check None itself.
    for meta in leaves if metadata is not None else [metadata]:
        if not isinstance(meta, parameters.ParameterMetadata):
            raise ValueError(
                f"metadata has the leaf {meta!r}, which is not a ParameterMetadata; use the return "
                "value of parameters.resolve"
            )
    adapted = {path for path, meta in zip(paths, leaves, strict=True) if meta.adapt}
    every = read(opt_state).get("ratios", {})
    ratios = [np.ravel(value) for path, value in every.items() if path in adapted]
    if not ratios:
        return {}
    values = np.concatenate(ratios)
    statistics: dict[str, Callable[..., Any]] = {"min": np.min, "median": np.median, "max": np.max}
    return {f"ratio_{name}": float(function(values)) for name, function in statistics.items()}


def scalars(opt_state: optax.OptState) -> dict[str, float]:
    """Returns the values of `read` in one flat dict, for a log.

    A name is, for example, 'ratios/dense/kernel', or 'ratios/layers/kernel[3]' for the layer at
    index 3 of a stack. With two layer axes the name ends in two indices, 'kernel[3,0]'.
    """
    flat = {}
    for name, values in read(opt_state).items():
        for path, value in values.items():
            for index, element in np.ndenumerate(value):
                suffix = f"[{','.join(map(str, index))}]" if index else ""
                flat[f"{name}/{path}{suffix}"] = float(element)
    return flat


def in_order(values: Mapping[str, float], paths: Sequence[str]) -> dict[str, float]:
    """Sorts the result of `scalars` by quantity, then by the order of `paths`.

    `paths` has the paths of all parameters. Stacks of layers that are consecutive in `paths` are
    sorted layer by layer: layer 0 of each stack, then layer 1 of each stack, and so on.

    >>> values = dict.fromkeys(["ratios/b/x[0]", "ratios/b/x[1]", "ratios/b/y[0]", "ratios/b/y[1]",
    ...                         "ratios/a"], 1.0)
    >>> list(in_order(values, ["b/y", "b/x", "a"]))
    ['ratios/b/y[0]', 'ratios/b/x[0]', 'ratios/b/y[1]', 'ratios/b/x[1]', 'ratios/a']
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"values={values!r} must be a mapping of names to numbers")
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"paths={paths!r} must be a list of the parameters' paths")
    positions = {path: position for position, path in enumerate(paths)}

    def sort_key(name: str) -> tuple[int, int, tuple[int, ...]]:
        quantity, _, layer = name.partition("/")
        match = re.fullmatch(r"(.*?)(?:\[([\d,]+)\])?", layer, re.DOTALL)
        assert match is not None  # any text matches
        path, index = match.groups()
        indices = tuple(map(int, index.split(","))) if index else ()
        return QUANTITIES.index(quantity), positions[path], indices

    # Consecutive stacks form one group. The stable sort by layer index then orders this group layer
    # by layer.
    ordered = sorted((sort_key(name), name) for name in values)
    runs = itertools.groupby(ordered, key=lambda item: (item[0][0], bool(item[0][2])))
    return {
        name: values[name]
        for (_, is_stack), run in runs
        for _, name in (sorted(run, key=lambda item: item[0][2]) if is_stack else run)
    }
