"""The matrix product of dense layers, with a kernel gradient that is also fast on CPUs.

For inputs (batch, steps, inputs) JAX computes the kernel's gradient as (outputs, inputs) and then
transposes it. XLA's CPU compiler copies the larger factor into another order and multiplies slowly.
This module computes (inputs, outputs) directly. Products of bfloat16 are fast if both factors are
bfloat16 and the sums float32, so the gradient is rounded before its products, as on a TPU. Other
devices use JAX's gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_Numbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def dot_general(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: _Numbers | None = None,
    precision: None = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiplies the last axis of `x` by a kernel; use it as `dot_general` of `nn.Dense`.

    Args:
      x: (..., inputs).
      kernel: (inputs, outputs).
      dimension_numbers: must contract the axes `inputs`, as in `nn.Dense`; None: these axes.
      precision: must be None, the default of `jax.lax`.
      preferred_element_type: dtype of the sums and of the result; None for the factors' dtype.

    Returns:
      (..., outputs). Differentiable in reverse mode; the gradient is differentiable in both modes.

    Raises:
      ValueError: other axes are contracted, the kernel is not a matrix, or a precision is given.
    """
    ours = _numbers(x)
    if dimension_numbers not in (None, ours) or kernel.ndim != 2 or precision is not None:
        raise ValueError(
            "dot_general needs factors (..., inputs) and (inputs, outputs), and precision=None"
        )
    return _product(x, kernel, preferred_element_type)


def _numbers(x: jax.Array) -> _Numbers:
    return ((x.ndim - 1,), (0,)), ((), ())


def _plain(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    return lax.dot_general(x, kernel, _numbers(x), preferred_element_type=dtype)


_product = jax.custom_vjp(_plain, nondiff_argnums=(2,))


def _forward(
    x: jax.Array, kernel: jax.Array, dtype: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # `_product` cannot be differentiated in forward mode, which Hessian-vector products need.
    return _plain(x, kernel, dtype), (x, kernel)


def _backward(
    dtype: Any, inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def on_cpu(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = tuple(range(x.ndim - 1))
        sums = np.promote_types(kernel.dtype, jnp.float32)
        product = functools.partial(lax.dot_general, preferred_element_type=sums)
        gradient = gradient.astype(kernel.dtype)
        of_x = product(gradient, kernel, (((x.ndim - 1,), (1,)), ((), ())))
        of_kernel = product(x, gradient, ((rows, rows), ((), ())))
        slopes = of_x.astype(x.dtype), of_kernel.astype(kernel.dtype)
        # Express both as JAX gradients of a linear function: under shard_map's check_vma JAX then
        # sums the gradient of a replicated kernel over devices, as usual.
        return jax.grad(lambda *both: sum(map(jnp.vdot, both, slopes)), (0, 1))(x, kernel)

    def default(
        x: jax.Array, kernel: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        back = jax.vjp(functools.partial(_plain, dtype=dtype), x, kernel)[1]
        slopes: tuple[jax.Array, jax.Array] = back(gradient)
        return slopes

    return lax.platform_dependent(*inputs, gradient, cpu=on_cpu, default=default)


_product.defvjp(_forward, _backward)
