"""Evaluates a traced program in float64, with a model of the program's rounding errors.

`jax_enable_x64` alone would not do: under it `jax.random` draws other numbers, and a network that
casts to float32 or bfloat16 would still round. `evaluate` evaluates the equations of the program as
traced in float32 instead. Floating-point arithmetic is done in float64, casts between floating-point
types do nothing, and integers, booleans and random bits are computed as traced, so the random
numbers are the same.

Each result of floating-point arithmetic is multiplied by 1 + k * eps * s, where eps is the machine
epsilon of the dtype that the program has there, and s is -1 or 1, drawn once for each element. With
k = 0 the evaluation is exact. The differences between k = 1, k = -1 and k = 0 show how much the
program's own rounding changes each result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from tests.fuzz.arithmetic import RULES

# Signs of the errors; longer arrays repeat them. The length is prime, so rows get other signs.
_SIGNS = np.resize(np.sign(np.random.default_rng(0).random(99_991) - 0.5), 400_000)
# These copy or choose values, and round nothing.
_CHOOSING = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice concatenate pad "
    "dynamic_update_slice gather select_n rev copy copy_p neg abs sign max min clamp reduce_max "
    "reduce_min argmax argmin sort stop_gradient iota reduce_window_max cummax cummin is_finite "
    "floor ceil round select_and_gather_add split top_k device_put".split()
)
_INLINED = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr shard_map".split()
)
# Collectives of one device are identities too.
_IDENTITIES = frozenset(
    "sharding_constraint layout_constraint optimization_barrier reduce_precision psum "
    "psum_invariant all_gather pvary mesh_cast".split()
)
_SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_mul": lax.scatter_mul,
    "scatter_min": lax.scatter_min,
    "scatter_max": lax.scatter_max,
}


def is_float(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, np.floating))


def widened(value: Any) -> Any:
    """Returns a floating-point array in float64, any other as a NumPy array, and a key unchanged."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    value = np.asarray(value)
    return value.astype(np.float64) if is_float(value.dtype) else value


def evaluate(closed: core.ClosedJaxpr, k: float, args: Sequence[Any]) -> list[Any]:
    """Returns the results of a traced function as a flat list of NumPy arrays and keys.

    `args` are the flat arguments of the traced function; floating-point arrays may be float64. `k`
    is the factor of the rounding errors.
    """
    with jax.enable_x64(True), np.errstate(all="ignore"):
        found = _Evaluation(k).call(closed, [widened(arg) for arg in args])
    return [np.asarray(each) if isinstance(each, np.generic) else each for each in found]


class _Evaluation:
    """One evaluation; the number of rounded results so far chooses the signs of the next."""

    def __init__(self, k: float) -> None:
        self._k = k
        self._count = 0
        # By their ids: numbers in the program's text, and functions of these and of random bits alone,
        # which the program computes exactly.
        self._drawn: dict[int, Any] = {}

    def call(self, inner: Any, args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr, with or without its constants."""
        consts: Sequence[Any] = ()
        if isinstance(inner, core.ClosedJaxpr):
            inner, consts = inner.jaxpr, [widened(const) for const in inner.consts]
        values: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
        values.update(zip(inner.invars, args, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                kind = np.float64 if is_float(atom.aval.dtype) else atom.aval.dtype
                return self._kept(np.array(atom.val, kind))
            return values[atom]

        for equation in inner.eqns:
            name = equation.primitive.name
            inputs = [read(atom) for atom in equation.invars]
            results = self._apply(name, equation, inputs)
            is_drawn = bool(inputs) and all(id(each) in self._drawn for each in inputs)
            if name == "bitcast_convert_type" or is_drawn:
                results = [self._kept(result) for result in results]
            elif name not in _CHOOSING and self._k:
                results = [
                    self._rounded(name, result, variable.aval, equation)
                    for result, variable in zip(results, equation.outvars, strict=True)
                ]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    def _kept(self, value: Any) -> Any:
        self._drawn[id(value)] = value  # the reference keeps the id from being used again
        return value

    def _rounded(self, name: str, value: Any, aval: Any, equation: Any) -> Any:
        called = name in _INLINED or name in ("scan", "while", "cond")
        if called or not is_float(aval.dtype) or not value.size:
            return value
        eps = float(jnp.finfo(aval.dtype).eps)
        if name == "convert_element_type":
            source = equation.invars[0].aval.dtype
            if not is_float(source) or float(jnp.finfo(source).eps) >= eps:
                return value  # a wider type holds every value of the narrower
        if name in _IDENTITIES:
            if name != "reduce_precision":
                return value
            eps = 2.0 ** -equation.params["mantissa_bits"]
        self._count += 1
        # Other factors have other signs, so that their differences are independent samples.
        start = (self._count * 7_919 + int(abs(self._k)) * 31_337) % 99_991
        if start + value.size <= len(_SIGNS):
            signs = _SIGNS[start : start + value.size]
        else:
            signs = np.resize(_SIGNS[start:], value.size)
        return value * (1 + (self._k * eps) * signs.reshape(value.shape))

    def _apply(self, name: str, equation: Any, inputs: list[Any]) -> list[Any]:
        params = equation.params
        if name in RULES:
            found = RULES[name](*inputs, **params)
            if found is not NotImplemented:
                return [found]
        if name in _IDENTITIES:
            return inputs
        if name in _INLINED:
            return self.call(params.get("jaxpr", params.get("call_jaxpr")), inputs)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(params, inputs)
        if name == "axis_index":
            return [np.int32(0)]
        if name == "convert_element_type":
            return [_converted(inputs[0], equation)]
        if name == "bitcast_convert_type":
            value = np.asarray(inputs[0]).astype(equation.invars[0].aval.dtype)
            return [widened(lax.bitcast_convert_type(value, params["new_dtype"]))]
        if name in _SCATTERS:
            options = {
                key: params[key]
                for key in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            }
            return [np.asarray(_SCATTERS[name](*map(jnp.asarray, inputs), **options))]
        if any(isinstance(value, core.ClosedJaxpr | core.Jaxpr) for value in params.values()):
            raise NotImplementedError(f"{name} calls a program and has no rule")
        found = equation.primitive.bind(*map(_as_jax, inputs), **_wide(params))
        return [
            widened(each) for each in (found if equation.primitive.multiple_results else [found])
        ]

    def _scan(self, params: Any, inputs: Sequence[Any]) -> list[Any]:
        consts, carried = params["num_consts"], params["num_carry"]
        fixed, carry = inputs[:consts], list(inputs[consts : consts + carried])
        rows, length = inputs[consts + carried :], params["length"]
        made: list[Any] = [None] * length
        for index in reversed(range(length)) if params["reverse"] else range(length):
            row = [each[index] for each in rows]
            found = self.call(params["jaxpr"], [*fixed, *carry, *row])
            carry, made[index] = found[:carried], found[carried:]
        return [*carry, *(np.stack(each) for each in zip(*made, strict=True))]

    def _while(self, params: Any, inputs: Sequence[Any]) -> list[Any]:
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        tests, fixed = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
        carry = list(inputs[of_cond + of_body :])
        while self.call(params["cond_jaxpr"], [*tests, *carry])[0]:
            carry = self.call(params["body_jaxpr"], [*fixed, *carry])
        return carry

    def _cond(self, params: Any, inputs: Sequence[Any]) -> list[Any]:
        branches = params["branches"]
        index = min(max(int(inputs[0]), 0), len(branches) - 1)
        return self.call(branches[index], inputs[1:])


def _converted(value: Any, equation: Any) -> Any:
    target = equation.params["new_dtype"]
    if is_float(target):
        return np.asarray(value, np.float64)
    if np.asarray(value).dtype.kind == "f":
        return np.asarray(lax.convert_element_type(value, target))  # rounds and saturates as XLA
    return np.asarray(value).astype(target)


def _as_jax(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _wide(params: Any) -> dict[str, Any]:
    """Returns the parameters of a primitive with float64 in place of floating-point types."""
    found = dict(params)
    for key in ("dtype", "new_dtype", "preferred_element_type"):
        if found.get(key) is not None and is_float(found[key]):
            found[key] = np.dtype(np.float64)
    for key in ("sharding", "out_sharding"):
        if key in found:
            found[key] = None
    return found
