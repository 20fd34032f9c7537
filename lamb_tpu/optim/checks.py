"""Checks of arguments: a wrong one is a ValueError that names the argument and the value."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def check_bounds(name: str, bounds: tuple[float, float]) -> None:
    """Raises ValueError unless bounds are (lower, upper) with 0 <= lower <= upper."""
    try:
        lower, upper = bounds
        in_order = 0.0 <= lower <= upper
    except (TypeError, ValueError):
        in_order = False
    if not in_order:
        raise ValueError(f"{name} must be (lower, upper), 0 <= lower <= upper, not {bounds!r}")


def check_dtype(name: str, dtype: Any, squares: bool = False) -> None:
    """Raises ValueError unless the dtype is None or of floating point.

    With `squares` it must have float32's range: float16 rounds squares of small gradients to 0.
    """
    try:
        floating = dtype is None or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"{name} must be a floating-point dtype or None, not {dtype!r}")
    if squares and dtype is not None and jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp:
        raise ValueError(
            f"{name} must have the range of float32, as bfloat16 has: in {dtype!r} squares of "
            "small gradients become 0"
        )


def check_range(name: str, value: Any, upper: float = math.inf) -> None:
    """Raises ValueError unless 0 <= value < upper, or when an array is narrower than float32.

    `optax.inject_hyperparams` turns numbers into arrays of the parameters' dtype; in bfloat16
    0.999 is 1.0, and 1 - b2 is lost. A value that is traced is not looked at.
    """
    if isinstance(value, jax.Array):
        if value.dtype.itemsize < 4:
            raise ValueError(
                f"{name} is a {value.dtype} array and has lost digits: "
                "give inject_hyperparams hyperparam_dtype=jnp.float32"
            )
        if isinstance(value, jax.core.Tracer):
            return
    try:
        in_range = 0.0 <= value < upper
    except TypeError:
        in_range = False
    if not in_range:
        limit = "" if upper == math.inf else f" and below {upper:g}"
        raise ValueError(f"{name} must be at least 0{limit}, not {value!r}")


def check_above_zero(**values: float) -> None:
    """Raises ValueError for the first value that is not a finite number above 0, by its name."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, not {value!r}")
