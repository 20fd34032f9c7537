"""The matrix product of dense layers, whose kernel's gradient is fast on CPUs too.

For inputs (batch, steps, inputs) JAX' gradient of the kernel is the product (outputs, inputs),
transposed after. XLA's CPU compiler copies the larger factor into another order for it and
multiplies by a slow route. Here the product is (inputs, outputs) from the start. Products of
bfloat16 are fast if both factors are bfloat16 and the sums float32, so the gradient is rounded
before its products, as a TPU does. On other devices the gradient is that of JAX.
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
    """Multiplies the last axis of `x` by a kernel; the argument `dot_general` of `nn.Dense`.

    Args:
      x: (..., inputs).
      kernel: (inputs, outputs).
      dimension_numbers: as `nn.Dense` gives them; None for the same.
      precision: only None, the default of `jax.lax`.
      preferred_element_type: dtype of the sums and of the result; None for that of the factors.

    Returns:
      (..., outputs). Differentiable in reverse mode, and its gradient in both.

    Raises:
      ValueError: other axes or a precision were given.
    """
    ours = _numbers(x)
    if dimension_numbers not in (None, ours) or kernel.ndim != 2 or precision is not None:
        raise ValueError("dot_general takes (..., inputs), (inputs, outputs) and no precision")
    return _product(x, kernel, preferred_element_type)


def _numbers(x: jax.Array) -> _Numbers:
    return ((x.ndim - 1,), (0,)), ((), ())


def _plain(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    return lax.dot_general(x, kernel, _numbers(x), preferred_element_type=dtype)


_product = jax.custom_vjp(_plain, nondiff_argnums=(2,))


def _forward(
    x: jax.Array, kernel: jax.Array, dtype: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not `_product`, which cannot be differentiated forward, as for a Hessian's product.
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
        found = of_x.astype(x.dtype), of_kernel.astype(kernel.dtype)
        # Written as gradients of a factor, so that under shard_map's check_vma JAX sums those of
        # a replicated kernel, as in its own derivatives.
        return jax.grad(lambda *both: sum(map(jnp.vdot, both, found)), (0, 1))(x, kernel)

    def default(
        x: jax.Array, kernel: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        back = jax.vjp(functools.partial(_plain, dtype=dtype), x, kernel)[1]
        found: tuple[jax.Array, jax.Array] = back(gradient)
        return found

    return lax.platform_dependent(*inputs, gradient, cpu=on_cpu, default=default)


_product.defvjp(_forward, _backward)
