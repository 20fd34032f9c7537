"""Model FLOPs: the arithmetic of training a model, counted before anything is compiled.

The count covers the matrix products and convolutions of the forward pass, with two operations for
each multiplication and its addition. Everything else is small in comparison. Training takes three
times the operations of the forward pass, because the backward pass has a product for the gradient
of each of the two factors. Recomputation, microbatches and shardings do not change the count.

For a Transformer of L layers with H heads of width Q on sequences of T tokens the count is the
usual 6 N + 12 L H Q T per token, where N is the number of parameters in matrices. A parameter counts
each time a product uses it: the parameters of an embedding count only if a product uses the embedding
as a matrix, and the parameters of a head only at the positions that the head predicts.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def training_flops(loss: Callable[..., Any], *args: Any) -> int:
    """Returns the FLOPs of computing `loss` and its gradient; `loss` is traced but not run.

    >>> import jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((8, 3), jnp.float32), jax.ShapeDtypeStruct((3, 5), jnp.float32)
    >>> training_flops(lambda w, x: jnp.sum(jnp.tanh(x @ w)), w, x) == 3 * 2 * 8 * 3 * 5
    True

    Args:
      loss: a function such as `Task.loss`. It must not be inside shard_map, where products have the
        shapes of one device's shard.
      *args: arguments of `loss`, or their shapes and dtypes.

    Raises:
      ValueError: see `matrix_flops`.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    return 3 * matrix_flops(jax.make_jaxpr(loss)(*shapes).jaxpr)


def matrix_flops(jaxpr: Jaxpr) -> int:
    """Returns the FLOPs of the matrix products and convolutions of a traced function.

    The body of a scan counts once per iteration. Of a conditional, the branch with the most FLOPs
    counts; of `lax.platform_dependent`, the default branch. Multiplications by the padding and dilation
    zeros of a convolution count; operations inside hand-written kernels do not.

    Raises:
      ValueError: a matrix product is in a while loop, whose number of iterations is unknown.
    """
    return sum(map(_flops, jaxpr.eqns))


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _flops(equation: JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "conv_general_dilated"):
        left, right = map(_shape, equation.invars)
        if name == "dot_general":
            # ((contracted axes of left, right), (batch axes of left, right)).
            (contracted, _), _ = params["dimension_numbers"]
            terms = math.prod(left[axis] for axis in contracted)
        else:
            # The kernel has the input channels of one group only.
            terms = math.prod(right) // right[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(_shape(equation.outvars[0])) * terms
    # The parameters include the jaxprs of jit, remat, loops, branches and custom derivatives.
    inner = [matrix_flops(part) for part in jaxprs_in_params(params)]
    if name == "while" and any(inner):
        raise ValueError(
            "a matrix product is in a while loop of unknown length; use jax.lax.scan instead"
        )
    if name == "cond":
        # A platform-specific branch may do more work than the model needs; None marks the default
        # branch.
        by_platform = params.get("branches_platforms") or ()
        return inner[by_platform.index(None)] if None in by_platform else max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)
