"""NumPy's form of the primitives that most programs consist of, in float64.

NumPy needs no compilation, which for a float64 program of thousands of small operations takes longer
than a hundred evaluations. A rule takes the inputs and the primitive's parameters. `exact` calls JAX
for a primitive without a rule.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

Rule = Callable[..., Any]


def _elementwise(function: Callable[..., Any]) -> Rule:
    return lambda *inputs, **params: function(*inputs)


def _of_floats(function: Callable[..., Any]) -> Rule:
    """A rule for floating-point inputs only: integers round or overflow differently in NumPy."""

    def rule(*inputs: Any, **params: Any) -> Any:
        return function(*inputs) if inputs[0].dtype.kind == "f" else NotImplemented

    return rule


def _integer_pow(x: Any, *, y: int, **params: Any) -> Any:
    return x**y if x.dtype.kind == "f" else NotImplemented


def _logistic(x: Any) -> Any:
    return special.expit(x)


def _reduce(function: Callable[..., Any]) -> Rule:
    def rule(x: Any, *, axes: tuple[int, ...], **params: Any) -> Any:
        return function(x, axis=tuple(axes)).astype(x.dtype)

    return rule


def _arg(function: Callable[..., Any]) -> Rule:
    def rule(x: Any, *, axes: tuple[int, ...], index_dtype: Any, **params: Any) -> Any:
        return function(x, axis=axes[0]).astype(index_dtype)

    return rule


def _broadcast(x: Any, *dynamic: Any, shape: Any, broadcast_dimensions: Any, **params: Any) -> Any:
    if dynamic:
        return NotImplemented
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _reshape(x: Any, *dynamic: Any, new_sizes: Any, **params: Any) -> Any:
    return x.reshape(new_sizes)


def _transpose(x: Any, *, permutation: Any, **params: Any) -> Any:
    return np.transpose(x, permutation)


def _squeeze(x: Any, *, dimensions: Any, **params: Any) -> Any:
    return np.squeeze(x, tuple(dimensions))


def _expand_dims(x: Any, *, dimensions: Any, **params: Any) -> Any:
    return np.expand_dims(x, tuple(dimensions))


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any, **params: Any) -> Any:
    strides = strides or (1,) * x.ndim
    return x[tuple(slice(*each) for each in zip(start_indices, limit_indices, strides))]


def _concatenate(*inputs: Any, dimension: int, **params: Any) -> Any:
    return np.concatenate(inputs, dimension)


def _iota(*, dtype: Any, shape: Any, dimension: int, **params: Any) -> Any:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _rev(x: Any, *, dimensions: Any, **params: Any) -> Any:
    return np.flip(x, tuple(dimensions))


def _select(which: Any, *cases: Any, **params: Any) -> Any:
    if len(cases) != 2:
        return NotImplemented
    return np.where(which, cases[1], cases[0])


def _clamp(low: Any, x: Any, high: Any, **params: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


def _dot(left: Any, right: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    (left_sums, right_sums), (left_batch, right_batch) = dimension_numbers
    left_free = [i for i in range(left.ndim) if i not in (*left_sums, *left_batch)]
    right_free = [i for i in range(right.ndim) if i not in (*right_sums, *right_batch)]
    batch = [left.shape[i] for i in left_batch]
    rows, columns = [left.shape[i] for i in left_free], [right.shape[i] for i in right_free]
    inner = math.prod(left.shape[i] for i in left_sums)
    a = left.transpose((*left_batch, *left_free, *left_sums)).reshape(
        (*batch, math.prod(rows), inner)
    )
    b = right.transpose((*right_batch, *right_sums, *right_free))
    product = np.matmul(a, b.reshape((*batch, inner, math.prod(columns))))
    return product.reshape((*batch, *rows, *columns))


def _cumsum(x: Any, *, axis: int, reverse: bool, **params: Any) -> Any:
    if reverse:
        return np.flip(np.cumsum(np.flip(x, axis), axis, dtype=x.dtype), axis)
    return np.cumsum(x, axis, dtype=x.dtype)


def _is_same_kind(function: Callable[..., Any], *inputs: Any, **params: Any) -> Any:
    return function(*inputs)


RULES: dict[str, Rule] = {
    **{
        name: functools.partial(_is_same_kind, function)
        for name, function in {
            "add": np.add,
            "add_any": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
            "neg": np.negative,
            "abs": np.abs,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "not": np.invert,
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "is_finite": np.isfinite,
            "stop_gradient": lambda x: x,
            "copy": lambda x: x,
            "copy_p": lambda x: x,
        }.items()
    },
    **{
        name: _of_floats(function)
        for name, function in {
            "div": np.divide,
            "exp": np.exp,
            "exp2": np.exp2,
            "log": np.log,
            "log1p": np.log1p,
            "expm1": np.expm1,
            "tanh": np.tanh,
            "sin": np.sin,
            "cos": np.cos,
            "sqrt": np.sqrt,
            "cbrt": np.cbrt,
            "rsqrt": lambda x: 1 / np.sqrt(x),
            "square": np.square,
            "logistic": _logistic,
            "erf": special.erf,
            "erfc": special.erfc,
            "erf_inv": special.erfinv,
            "sign": np.sign,
            "floor": np.floor,
            "ceil": np.ceil,
        }.items()
    },
    "integer_pow": _integer_pow,
    "reduce_sum": _reduce(np.sum),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_prod": _reduce(np.prod),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand_dims,
    "slice": _slice,
    "concatenate": _concatenate,
    "iota": _iota,
    "rev": _rev,
    "select_n": _select,
    "clamp": _clamp,
    "dot_general": _dot,
    "cumsum": _cumsum,
}
