"""Checks of arguments; a ValueError names an invalid argument and its value."""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

# Arguments in [0, 1): decay rates of moving averages, and fractions.
_BELOW_ONE = ("b1", "b2", "b3", "beta", "momentum", "dampening", "relative_floor")
_FROM_ZERO = ("anchor", "seed", "start")  # other whole numbers must be at least 1


def is_number(value: Any) -> bool:
    """Returns whether the value is a real number or a real scalar array (also traced), but not a bool."""
    # Tracers are `jax.Array`s: their shape and dtype are known, but not their value.
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        return value.shape == () and bool(real)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def checked(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Checks a function's arguments against the function's annotations, and returns the arguments.

    Flags must be True or False. Floats must be at least 0, and below 1 if `_BELOW_ONE` has their name.
    Whole numbers, schedules, bounds, dtypes and mesh axes are checked too. The caller checks arguments
    that have a list of choices.

    Args:
      function: the function that calls `checked`.
      given: the `locals()` of `function`.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        kind, value = parameter.annotation, given[name]
        if kind is bool:
            check_flag(name, value)
        elif kind is int:
            check_whole(name, value, lowest=0 if name in _FROM_ZERO else 1)
        elif kind is float or (name in _BELOW_ONE and value is not None):
            check_range(name, value, 1.0 if name in _BELOW_ONE else math.inf)
        elif kind == optax.ScalarOrSchedule:
            check_schedule(name, value)
        elif kind == tuple[float, float]:
            check_bounds(name, value)
        elif name.endswith("_dtype"):
            check_dtype(name, value, squares=name == "nu_dtype")
        elif name == "axis_name":
            check_axis_name(value)
    return given


def check_choices(**given: tuple[Any, Sequence[str]]) -> None:
    """Raises ValueError unless each value is a choice; call with name=(value, choices)."""
    for name, (value, choices) in given.items():
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_mapping(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} must be a mapping or None")


def check_bounds(name: str, bounds: tuple[float, float]) -> None:
    """Raises ValueError unless bounds are (lower, upper) with 0 <= lower <= upper and finite lower."""
    pair = is_pair(bounds) and all(map(is_number, bounds))
    if not pair or not 0.0 <= bounds[0] <= bounds[1] or bounds[0] == math.inf:
        raise ValueError(
            f"{name}={bounds!r} must be (lower, upper) with 0 <= lower <= upper and lower < inf"
        )


def check_dtype(name: str, dtype: Any, squares: bool = False) -> None:
    """Raises ValueError unless the dtype is a floating-point dtype or None.

    With `squares` the dtype must have the range of float32: float16 rounds squares of small
    gradients to 0.
    """
    try:
        floating = dtype is None or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        floating = False
    if not floating or (hasattr(dtype, "shape") and not isinstance(dtype, np.dtype)):
        raise ValueError(f"{name}={dtype!r} must be a floating-point dtype or None")
    # The smallest normal number is 2^-14 in float16, and 2^-126 in float32 and bfloat16.
    if squares and dtype is not None and jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp:
        raise ValueError(
            f"{name}={dtype!r} must have the range of float32, because squares of small gradients "
            "become 0 otherwise; use float32 or bfloat16"
        )


def check_range(name: str, value: Any, upper: float = math.inf) -> None:
    """Raises ValueError unless 0 <= value < upper; also rejects JAX arrays narrower than float32.

    `optax.inject_hyperparams` turns numbers into arrays of the parameters' dtype. In bfloat16
    0.999 becomes 1.0, so 1 - b2 would become 0. The range of traced values is not checked.
    """
    number = is_number(value)
    if number and isinstance(value, jax.Array):
        if value.dtype.itemsize < 4:
            raise ValueError(
                f"{name} is a {value.dtype} array, which is too imprecise; "
                "pass hyperparam_dtype=jnp.float32 to optax.inject_hyperparams"
            )
        # A traced number has no value to compare.
        if isinstance(value, jax.core.Tracer):
            return
    if not number or not 0.0 <= value < upper:
        limit = " and finite" if upper == math.inf else f" and below {upper:g}"
        raise ValueError(f"{name}={value!r} must be at least 0{limit}")


def check_schedule(name: str, value: Any) -> None:
    """Raises ValueError unless the value is at least 0 or a function (a schedule)."""
    if not callable(value):
        check_range(name, value)


def check_above_zero(**values: float) -> None:
    """Raises ValueError for the first value that is not a finite number above 0."""
    for name, value in values.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} must be above 0 and finite")


def check_whole(name: str, value: Any, lowest: int = 0) -> None:
    """Raises ValueError unless the value is traced or a whole number of at least `lowest`."""
    number = is_number(value)
    if number and isinstance(value, jax.core.Tracer):
        return
    # `optax.inject_hyperparams` turns whole numbers into float32 arrays too.
    whole = isinstance(value, numbers.Integral) or isinstance(value, (jax.Array, np.ndarray))
    if not number or not whole or value < lowest or value % 1 != 0:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {lowest}")


def check_static(**values: Any) -> None:
    """Raises ValueError if a value is a JAX array, for example from `optax.inject_hyperparams`.

    These arguments determine shapes or the program itself, so an update cannot change them.
    """
    if any(isinstance(value, jax.Array) for value in values.values()):
        raise ValueError(
            f"JAX arrays are not allowed for {', '.join(values)}; pass "
            f"static_args={tuple(values)!r} to optax.inject_hyperparams"
        )


def check_axis_name(axis_name: Any) -> None:
    """Raises ValueError unless `axis_name` has one of the forms of `trust_ratio.AxisName`.

    If `axis_name` is a function, `trust_ratio.axes_of` checks its return value for each leaf.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    given = axis_name is None or callable(axis_name) or isinstance(axis_name, PartitionSpec)
    if not given and not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"axis_name={axis_name!r} must be a mesh axis, a tuple of mesh axes, a PartitionSpec, "
            "a function from a leaf's path to one of these, or None"
        )


def check_transform(name: str, tx: Any) -> None:
    """Raises ValueError unless `tx` has the functions `init` and `update`, like a transform."""
    if not all(callable(getattr(tx, function, None)) for function in ("init", "update")):
        raise ValueError(f"{name}={tx!r} must be an Optax transform")


def check_state(state: Any, kind: type) -> None:
    """Raises ValueError unless the state has the type `kind`, which the transform's `init` returns."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state={short(state)} must be the {kind.__name__} from this transform's init"
        )


def check_opt_state(opt_state: optax.OptState) -> None:
    """Raises ValueError if the state is None or a single leaf that is not an array."""
    # A state may be a single array, or a container without leaves, such as `optax.EmptyState()`.
    bare = jax.tree_util.all_leaves([opt_state]) and not _is_array(opt_state)
    if opt_state is None or bare:
        raise ValueError(f"opt_state={opt_state!r} must be an optimizer's state")


def check_moments(source: str, moments: Any, params: optax.Params) -> None:
    """Raises ValueError unless each parameter has a second moment; the message starts with `source`."""
    if jax.tree.structure(moments) != jax.tree.structure(params) or any(
        np.shape(v) != np.shape(p)
        for v, p in zip(jax.tree.leaves(moments), jax.tree.leaves(params), strict=True)
    ):
        raise ValueError(
            f"{source} second moments that do not match the parameters; use an optimizer whose state "
            "has the field `nu`, such as lamb, adam or adamw"
        )


def joined(path: tuple[Any, ...]) -> str:
    """Returns the keys of a path into a tree, joined by '/'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_arrays(name: str, tree: Any) -> None:
    """Raises ValueError unless every leaf has a shape and a dtype, like an array, or is a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_array(leaf) and not is_number(leaf):
            where = joined(path)
            raise ValueError(
                f"{name}{f'[{where!r}]' if where else ''}={short(leaf)} must be an array"
            )


def gradient_leaves(updates: optax.Updates, params: optax.Params) -> list[jax.Array]:
    """Returns the leaves of `updates`, one per parameter.

    Raises ValueError if `params` is None, `updates` has a different structure than `params`, or a
    leaf is not an array, differs in shape from its parameter, or is complex for a real parameter.
    """
    if params is None:
        raise ValueError("params is None; call update(grads, state, params)")
    check_arrays("params", params)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    try:
        # Unlike `jax.tree.leaves`, `flatten_up_to` returns None as a leaf; the loop rejects it.
        grads = treedef.flatten_up_to(updates)
    except ValueError as error:
        raise ValueError(
            f"updates={short(updates)} must have the structure of params: {error}"
        ) from None
    for (path, param), grad in zip(leaves, grads, strict=True):
        where = joined(path)
        if not _is_array(grad):
            raise ValueError(f"updates[{where!r}]={short(grad)} must be an array")
        # Without this check JAX would silently broadcast the gradient or the parameter.
        if grad.shape != np.shape(param):
            raise ValueError(
                f"updates[{where!r}] has the shape {grad.shape}, but must have its parameter's shape "
                f"{np.shape(param)}"
            )
        # A cast to the parameter's dtype would drop the imaginary part.
        if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            raise ValueError(
                f"updates[{where!r}] is {grad.dtype}, but must be real like its parameter, which is "
                f"{jnp.result_type(param)}"
            )
    return grads


def check_result(result: Any, params: optax.Params, state: Any) -> None:
    """Checks the return value of a transform's `update`.

    Raises ValueError if the updates do not match the parameters, or if the new state differs from
    `state`, the argument of `update`, in structure, shapes or dtypes.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"update must return (updates, state), not {short(result)}")
    updates, after = result
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
        where = f", only in one of them: {changed[0]!r}" if changed else ""
        raise ValueError(
            "update must not change the structure of its state (number of arrays before: "
            f"{len(known)}, after: {len(now)}{where})"
        )
    for path, leaf in known.items():
        before, later = _described(leaf), _described(now[path])
        if before != later:
            raise ValueError(
                "update must not change the shapes and dtypes of its state, but changed "
                f"{path!r} from {before} to {later}"
            )


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    return {joined(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _described(leaf: Any) -> str:
    # `jnp.result_type` rejects the dtype of a random key.
    dtype = leaf.dtype if _is_array(leaf) else jnp.result_type(leaf)
    return f"{dtype}{list(np.shape(leaf))}"


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def short(value: Any) -> str:
    """Returns the value's `repr`, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
