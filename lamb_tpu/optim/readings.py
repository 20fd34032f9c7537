"""Reads what optimizers keep in their states: moments, and ratios where `collect=True`."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from lamb_tpu.optim import checks, parameters
from lamb_tpu.optim.trust_ratio import Readings

QUANTITIES = Readings._fields


def second_moments(opt_state: optax.OptState) -> Any:
    """Returns the second moments in an optimizer's state, or None.

    They are the field `nu` of one part of the state, as of LAMB, Adam and those of Optax; where
    several parts have one, the answer is None.
    """
    checks.check_opt_state(opt_state)
    try:
        return optax.tree_utils.tree_get(opt_state, "nu")
    except KeyError:  # several
        return None


def read(opt_state: optax.OptState) -> dict[str, dict[str, np.ndarray]]:
    """Trust ratios, update norms and weight norms by parameter path, from any optimizer's state.

    Finds them inside `optax.chain`, `optax.partition`, `optax.MultiSteps` and the like; where
    several transforms collect, their parameters are put together.

    >>> import jax.numpy as jnp
    >>> from lamb_tpu import optim
    >>> tx = optim.lamb(0.1, weight_decay=0.0, collect=True)
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> _, state = tx.update({'kernel': jnp.array([1., 1.])}, tx.init(params), params)
    >>> {name: round(float(values['kernel']), 4) for name, values in read(state).items()}
    {'ratios': 3.5355, 'update_norms': 0.5, 'weight_norms': 5.0}

    Returns:
      {'ratios': {path: value}, 'update_norms': ..., 'weight_norms': ...}; a value is a float32
      array shaped by the parameter's layer axes: () or (num_layers,). Empty where nothing collects.
    """
    checks.check_opt_state(opt_state)
    found = [
        # As leaves, whole `Readings` are found in a state of any structure.
        state
        for state in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Readings))
        if isinstance(state, Readings)
    ]
    quantities: dict[str, dict[str, np.ndarray]] = {}
    # One transfer for all of them.
    for readings in jax.device_get(found):
        for name in QUANTITIES:
            tree = getattr(readings, name)
            values = dict(zip(parameters.leaf_paths(tree), jax.tree.leaves(tree), strict=True))
            quantities.setdefault(name, {}).update(values)
    return quantities


def summary(opt_state: optax.OptState, facts: Any) -> dict[str, float]:
    """Smallest, median and largest trust ratio of the layers that adapt, each of a stack by itself.

    Args:
      opt_state: of any optimizer.
      facts: of the parameters, see `parameters.resolve`.

    Returns:
      `ratio_min`, `ratio_median`, `ratio_max`; empty where no layer that adapts is collected.
    """
    paths, leaves = parameters.leaf_paths(facts), jax.tree.leaves(facts)
    # None is a tree without leaves, which would pass.
    for fact in leaves if facts is not None else [facts]:
        if not isinstance(fact, parameters.ParameterFacts):
            raise ValueError(f"facts must be those of `parameters.resolve`, and hold {fact!r}")
    adapted = {path for path, fact in zip(paths, leaves, strict=True) if fact.adapt}
    ratios = [
        np.ravel(value)
        for path, value in read(opt_state).get("ratios", {}).items()
        if path in adapted
    ]
    if not ratios:
        return {}
    found = np.concatenate(ratios)
    return {
        "ratio_min": float(np.min(found)),
        "ratio_median": float(np.median(found)),
        "ratio_max": float(np.max(found)),
    }


def scalars(opt_state: optax.OptState) -> dict[str, float]:
    """Flattens `read` into one dict, for a log: 'ratios/dense/kernel', '.../kernel[3]' in a stack.

    The fourth layer of a stack has the index 3; two layer axes give 'kernel[3,0]'.
    """
    flat = {}
    for name, values in read(opt_state).items():
        for path, value in values.items():
            for index, element in np.ndenumerate(value):
                suffix = f"[{','.join(map(str, index))}]" if index else ""
                flat[f"{name}/{path}{suffix}"] = float(element)
    return flat


def in_order(values: Mapping[str, float], paths: Sequence[str]) -> dict[str, float]:
    """Sorts what `scalars` gives: by quantity, then in the order of the parameters' paths.

    Parameters that stack the same layers and follow one another are taken layer by layer.

    >>> values = dict.fromkeys(["ratios/b/x[0]", "ratios/b/x[1]", "ratios/b/y[0]", "ratios/b/y[1]",
    ...                         "ratios/a"], 1.0)
    >>> list(in_order(values, ["b/y", "b/x", "a"]))
    ['ratios/b/y[0]', 'ratios/b/x[0]', 'ratios/b/y[1]', 'ratios/b/x[1]', 'ratios/a']

    Args:
      values: by names such as 'ratios/dense/kernel' or 'ratios/layers/kernel[3]'.
      paths: of all parameters.

    Raises:
      ValueError: an argument of another kind.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"values must be a mapping of names to numbers, not {values!r}")
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"paths must be a list of the parameters' paths, not {paths!r}")
    places = {path: place for place, path in enumerate(paths)}

    def parts(name: str) -> tuple[int, int, tuple[int, ...]]:
        quantity, _, layer = name.partition("/")
        found = re.fullmatch(r"(.*?)(?:\[([\d,]+)\])?", layer, re.DOTALL)
        assert found is not None  # any text matches
        path, index = found.groups()
        indices = tuple(map(int, index.split(","))) if index else ()
        return QUANTITIES.index(quantity), places[path], indices

    # By quantity, then by the parameter's place. Neighbouring stacks form one run of the groups,
    # and the stable sort by the layer's index interleaves them layer by layer.
    ordered = sorted((parts(name), name) for name in values)
    runs = itertools.groupby(ordered, key=lambda item: (item[0][0], bool(item[0][2])))
    return {
        name: values[name]
        for (_, is_stack), run in runs
        for _, name in (sorted(run, key=lambda item: item[0][2]) if is_stack else run)
    }
