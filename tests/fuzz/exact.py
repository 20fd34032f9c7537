"""Evaluates a traced program in float64, with a model of the program's rounding errors.

`jax_enable_x64` alone would not do: under it `jax.random` draws other numbers, and a network that
casts to float32 or bfloat16 would still round. `Exact` evaluates the equations of the program that
was traced in float32 instead. Floating-point arithmetic is done in float64, casts between
floating-point types do nothing, and integers, booleans and random bits are computed as traced, so
the random numbers are the same.

Each result of floating-point arithmetic is multiplied by 1 + k * eps * s, where eps is the machine
epsilon of the dtype that the program has there, and s is -1 or 1, drawn once for each element. With
k = 0 the evaluation is exact. The differences between k = 1, k = -1 and k = 0 show how much the
program's own rounding changes each result.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

# Signs of the errors; longer arrays repeat them. The length is prime, so rows get other signs.
_SIGNS = np.sign(np.random.default_rng(0).random(99_991) - 0.5)
# These copy or choose values, and round nothing.
_CHOOSING = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice "
    "concatenate pad gather select_n rev copy copy_p neg abs sign max min clamp reduce_max reduce_min "
    "argmax argmin sort stop_gradient iota reduce_window_max cummax cummin is_finite floor ceil round "
    "select_and_gather_add split real imag squeeze top_k optimization_barrier device_put".split()
)
_INLINED = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr custom_lin".split()
)
_IDENTITIES = frozenset("sharding_constraint layout_constraint optimization_barrier".split())
_SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_add": lax.scatter_add,
    "scatter_mul": lax.scatter_mul,
    "scatter_min": lax.scatter_min,
    "scatter_max": lax.scatter_max,
}


def is_float(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, np.floating)


def widened(value: Any) -> Any:
    """Returns a floating-point array in float64, and any other array unchanged."""
    if is_float(value.dtype):
        return np.asarray(value).astype(np.float64)
    return value


class Exact:
    """A traced function in float64: `exact(k, *args)` returns the results as a flat list.

    Call it with `jax.enable_x64` on; it may be traced by `jax.jit`. `args` are the flat arguments of
    the traced function, with floating-point arrays in float64, see `widened`.
    """

    def __init__(self, closed: core.ClosedJaxpr) -> None:
        self._closed = closed
        self._count = 0

    def __call__(self, k: Any, *args: Any) -> list[Any]:
        self._count = 0
        consts = [widened(const) for const in self._closed.consts]
        return self._evaluate(self._closed.jaxpr, k, consts, args)

    def _evaluate(
        self, jaxpr: Any, k: Any, consts: Sequence[Any], args: Sequence[Any]
    ) -> list[Any]:
        values: dict[Any, Any] = {}
        # Variables that are functions of random bits alone, which the program computes exactly.
        drawn: set[Any] = set()

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                kind = np.float64 if is_float(atom.aval.dtype) else atom.aval.dtype
                return np.asarray(atom.val, kind)
            return values[atom]

        values.update(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            results = self._apply(equation, k, inputs)
            name = equation.primitive.name
            variables = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
            is_drawn = name in ("bitcast_convert_type", "iota") or (
                bool(variables) and drawn.issuperset(variables)
            )
            if is_drawn:
                drawn.update(equation.outvars)
            elif name not in _CHOOSING:
                results = [
                    self._rounded(result, variable.aval, equation, k)
                    for result, variable in zip(results, equation.outvars, strict=True)
                ]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _rounded(self, value: Any, aval: Any, equation: Any, k: Any) -> Any:
        name = equation.primitive.name
        if not is_float(aval.dtype) or name in _INLINED or name in ("scan", "while", "cond"):
            return value
        eps = float(jnp.finfo(aval.dtype).eps)
        if name == "convert_element_type":
            source = equation.invars[0].aval.dtype
            if not is_float(source) or float(jnp.finfo(source).eps) >= eps:
                return value  # a wider type holds every value of the narrower
        if name == "reduce_precision":
            eps = 2.0 ** -equation.params["mantissa_bits"]
        self._count += 1
        start = zlib.crc32(f"{self._count}".encode()) % len(_SIGNS)
        signs = np.resize(np.roll(_SIGNS, -start)[: max(value.size, 1)], value.shape)
        return value * (1 + (k * eps) * signs)

    def _apply(self, equation: Any, k: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in _IDENTITIES:
            return inputs
        if name in _INLINED:
            inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
            return self._call(inner, k, inputs)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(params, k, inputs)
        if name in _SCATTERS:
            operand, indices, updates = inputs
            options = {
                key: params[key]
                for key in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            }
            return [_SCATTERS[name](operand, indices, updates, **options)]
        if name == "convert_element_type":
            target = params["new_dtype"]
            if is_float(target):
                return [jnp.asarray(inputs[0]).astype(np.float64)]
            return [lax.convert_element_type(inputs[0], target)]
        if name == "reduce_precision":
            return inputs
        if name == "bitcast_convert_type":
            source = equation.invars[0].aval.dtype
            value = lax.bitcast_convert_type(
                jnp.asarray(inputs[0]).astype(source), params["new_dtype"]
            )
            return [value.astype(np.float64) if is_float(value.dtype) else value]
        if any(isinstance(value, core.ClosedJaxpr) for value in params.values()):
            raise NotImplementedError(f"{name} calls a program and has no rule")
        found = equation.primitive.bind(*inputs, **_wide(params))
        return list(found) if equation.primitive.multiple_results else [found]

    def _call(self, inner: Any, k: Any, inputs: Sequence[Any]) -> list[Any]:
        if isinstance(inner, core.ClosedJaxpr):
            return self._evaluate(inner.jaxpr, k, [widened(c) for c in inner.consts], inputs)
        return self._evaluate(inner, k, [], inputs)

    def _scan(self, params: Any, k: Any, inputs: Sequence[Any]) -> list[Any]:
        consts, carried = params["num_consts"], params["num_carry"]
        fixed, start = inputs[:consts], inputs[consts : consts + carried]

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            found = self._call(params["jaxpr"], k, [*fixed, *carry, *xs])
            return found[:carried], found[carried:]

        rows = inputs[consts + carried :]
        options = dict(length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
        carry, stacked = lax.scan(body, _arrays(start), _arrays(rows), **options)
        return [*carry, *stacked]

    def _while(self, params: Any, k: Any, inputs: Sequence[Any]) -> list[Any]:
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        tests, fixed = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
        return lax.while_loop(
            lambda carry: self._call(params["cond_jaxpr"], k, [*tests, *carry])[0],
            lambda carry: self._call(params["body_jaxpr"], k, [*fixed, *carry]),
            _arrays(inputs[of_cond + of_body :]),
        )

    def _cond(self, params: Any, k: Any, inputs: Sequence[Any]) -> list[Any]:
        index, *operands = inputs
        branches = [
            functools.partial(lambda branch, *args: self._call(branch, k, args), branch)
            for branch in params["branches"]
        ]
        return lax.switch(index.astype(np.int32), branches, *_arrays(operands))


def _arrays(values: Sequence[Any]) -> list[jax.Array]:
    return [
        value if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else jnp.asarray(value)
        for value in values
    ]


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
