"""Checks of arguments: a wrong one is a ValueError that names the argument and the value."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec


def is_number(value: Any) -> bool:
    """Returns True for one real number, also in an array or traced; True and False are none."""
    # Tracers are `jax.Array`s: their shape and dtype are known, and their value is not.
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        return value.shape == () and bool(real)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def check_mapping(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a mapping or None."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping or None, not {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_bounds(name: str, bounds: tuple[float, float]) -> None:
    """Raises ValueError unless bounds are (lower, upper) with 0 <= lower <= upper, lower finite."""
    pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(map(is_number, bounds))
    if not pair or not 0.0 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{name} must be (lower, upper), 0 <= lower <= upper, not {bounds!r}")
    if bounds[0] == math.inf:
        raise ValueError(f"{name} must be (lower, upper) with a finite lower, not {bounds!r}")


def check_dtype(name: str, dtype: Any, squares: bool = False) -> None:
    """Raises ValueError unless the dtype is None or of floating point.

    With `squares` it must have float32's range: float16 rounds squares of small gradients to 0.
    """
    try:
        floating = dtype is None or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        floating = False
    if not floating or (hasattr(dtype, "shape") and not isinstance(dtype, np.dtype)):
        raise ValueError(f"{name} must be a floating-point dtype or None, not {dtype!r}")
    # The smallest normal number of float16 is 2^-14; that of float32 and bfloat16 is 2^-126.
    if squares and dtype is not None and jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp:
        raise ValueError(
            f"{name} must have the range of float32, as bfloat16 has: in {dtype!r} squares of "
            "small gradients become 0"
        )


def check_range(name: str, value: Any, upper: float = math.inf) -> None:
    """Raises ValueError unless 0 <= value < upper, or when an array is narrower than float32.

    `optax.inject_hyperparams` turns numbers into arrays of the parameters' dtype; in bfloat16
    0.999 is 1.0, and 1 - b2 is lost. Traced values pass.
    """
    number = is_number(value)
    if number and isinstance(value, jax.Array):
        if value.dtype.itemsize < 4:
            raise ValueError(
                f"{name} is a {value.dtype} array and has lost digits: "
                "give inject_hyperparams hyperparam_dtype=jnp.float32"
            )
        # A comparison would ask for the value of a traced number.
        if isinstance(value, jax.core.Tracer):
            return
    if not number or not 0.0 <= value < upper:
        limit = "" if upper == math.inf else f" and below {upper:g}"
        raise ValueError(f"{name} must be at least 0{limit}, not {value!r}")


def check_schedule(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a number of at least 0, or a schedule."""
    if not callable(value):
        check_range(name, value)


def check_above_zero(**values: float) -> None:
    """Raises ValueError for the first value that is not a finite number above 0, by its name."""
    for name, value in values.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, not {value!r}")


def check_whole(name: str, value: Any, lowest: int = 0) -> None:
    """Raises ValueError unless the value is a whole number of at least `lowest`, or traced."""
    number = is_number(value)
    if number and isinstance(value, jax.core.Tracer):
        return
    # `optax.inject_hyperparams` makes arrays of float32 of whole numbers too.
    whole = isinstance(value, numbers.Integral) or isinstance(value, (jax.Array, np.ndarray))
    if not number or not whole or value < lowest or value % 1 != 0:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, not {value!r}")


def check_static(**values: Any) -> None:
    """Raises ValueError if one of the values is a JAX array, as `optax.inject_hyperparams` makes.

    These arguments decide shapes or the program itself, so that an update cannot change them.
    """
    if any(isinstance(value, jax.Array) for value in values.values()):
        raise ValueError(
            f"{' and '.join(values)} must not be an array; give optax.inject_hyperparams "
            f"static_args={tuple(values)!r}"
        )


def check_axis_name(axis_name: Any) -> None:
    """Raises ValueError unless it is a mesh axis, a tuple of them, a spec, a function, or None.

    What a function gives is checked where it is called, leaf by leaf.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    given = axis_name is None or callable(axis_name) or isinstance(axis_name, PartitionSpec)
    if not given and not all(isinstance(name, str) for name in names):
        raise ValueError(
            "axis_name must be a mesh axis, a tuple of them, a PartitionSpec, a function of a "
            f"leaf's path to one of these, or None, not {axis_name!r}"
        )


def check_transform(name: str, tx: Any) -> None:
    """Raises ValueError unless it has the functions `init` and `update` of an Optax transform."""
    if not all(callable(getattr(tx, function, None)) for function in ("init", "update")):
        raise ValueError(f"{name} must be an Optax transform, not {tx!r}")


def check_state(state: Any, kind: type) -> None:
    """Raises ValueError unless the state is of that type; another optimizer's is not."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state must be the {kind.__name__} that this transform's init made, not {short(state)}"
        )


def check_opt_state(opt_state: Any) -> None:
    """Raises ValueError for None and for a single leaf that is no array: no transform's state."""
    # A state may be a single array, or a container without leaves, such as `optax.EmptyState()`.
    bare = jax.tree_util.all_leaves([opt_state]) and not _is_array(opt_state)
    if opt_state is None or bare:
        raise ValueError(f"opt_state must be an optimizer's state, not {opt_state!r}")


def check_moments(source: str, moments: Any, params: Any) -> None:
    """Raises ValueError, which begins with `source`, unless each parameter has a second moment."""
    if jax.tree.structure(moments) != jax.tree.structure(params) or any(
        np.shape(v) != np.shape(p)
        for v, p in zip(jax.tree.leaves(moments), jax.tree.leaves(params), strict=True)
    ):
        raise ValueError(
            f"{source} no second moment of each parameter, as lamb, adam and adamw keep them in "
            "the field `nu` of their state"
        )


def check_arrays(name: str, tree: Any) -> None:
    """Raises ValueError unless every leaf has a shape and a dtype, as arrays do, or is a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_array(leaf) and not is_number(leaf):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"{name} must hold arrays, and {f'{where!r} ' if where else ''}is {short(leaf)}"
            )


def gradient_leaves(updates: Any, params: Any) -> list[jax.Array]:
    """The leaves of `updates`, one for each of `params`.

    Raises:
      ValueError: params is None; updates that have another structure than params, or a leaf that
        is no array, has another shape than its parameter, or is complex where that is real.
    """
    if params is None:
        raise ValueError("params is None: call update(grads, state, params)")
    check_arrays("params", params)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    try:
        # As deep as params and no deeper, so that a None where a gradient should be is found and
        # named below.
        grads = treedef.flatten_up_to(updates)
    except ValueError as error:
        raise ValueError(
            f"updates must have the structure of params, and is {short(updates)}: {error}"
        ) from None
    for (path, param), grad in zip(leaves, grads, strict=True):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        if not _is_array(grad):
            raise ValueError(
                f"updates must hold an array for the parameter {where!r}, not {short(grad)}"
            )
        # Otherwise it would be broadcast without a word.
        if grad.shape != np.shape(param):
            raise ValueError(
                f"updates hold an array of the shape {grad.shape} for the parameter {where!r} of "
                f"the shape {np.shape(param)}"
            )
        # A cast to the parameter's dtype would drop the imaginary part.
        if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            raise ValueError(
                f"updates hold {grad.dtype} for the parameter {where!r}, which is "
                f"{jnp.result_type(param)}"
            )
    return grads


def check_result(found: Any, params: Any, state: Any) -> None:
    """Raises ValueError unless an update returns updates like the parameters, and a like state.

    Args:
      found: what `update` has returned.
      params: the parameters.
      state: the state that `update` was given.
    """
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"update must return (updates, state), not {short(found)}")
    updates, after = found
    try:
        leaves = gradient_leaves(updates, params)
    except ValueError as error:
        raise ValueError(f"update must return updates like the parameters: {error}") from None
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(f"update must return floating-point updates, not {leaf.dtype}")
    known, now = _leaves_by_path(state), _leaves_by_path(after)
    changed = [path for path in [*known, *now] if (path in known) != (path in now)]
    if changed or jax.tree.structure(state) != jax.tree.structure(after):
        where = f", {changed[0]!r} is in one of them only" if changed else ""
        raise ValueError(
            "update must return a state of the structure that it is given: there are "
            f"{len(known)} arrays before and {len(now)} after it{where}"
        )
    for path, leaf in known.items():
        before, later = _described(leaf), _described(now[path])
        if before != later:
            raise ValueError(
                f"update must keep shapes and dtypes of its state: {path!r} is {before} before "
                f"and {later} after it"
            )


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _described(leaf: Any) -> str:
    # A random key has no dtype of NumPy's.
    dtype = leaf.dtype if _is_array(leaf) else jnp.result_type(leaf)
    return f"{dtype}{list(np.shape(leaf))}"


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def short(value: Any) -> str:
    """Returns the value's `repr`, cut off after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
