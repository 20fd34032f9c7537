"""Model FLOPs: the arithmetic that training a model asks for, counted before anything is compiled.

The count covers the matrix products and convolutions of the forward pass, with two operations for
each multiplication and its addition. The rest (activations, norms, softmax, embedding look-ups, the
optimizer) is small in comparison. Training takes three times that, because the backward pass has a
product for the gradient of each of the two factors. Recomputation to save memory, other work of a
device, and the way the batch is cut or spread do not change the count. So the model FLOP/s
utilisation (MFU), which is these FLOPs divided by the time and by the devices' peak, compares
different programs for one model.

For a Transformer of L layers with H heads of width Q on sequences of T tokens the count is the
usual 6 N + 12 L H Q T for each token, N being the number of parameters in matrices. Here a
parameter counts each time a product uses it: an embedding's only where it is used as a matrix, a
head's only at the positions that the head predicts.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def training_flops(loss: Callable[..., Any], *args: Any) -> int:
    """FLOPs of a function's value and gradient: three times those of the value.

    The function is only traced; nothing is computed.

    >>> import jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((8, 3), jnp.float32), jax.ShapeDtypeStruct((3, 5), jnp.float32)
    >>> training_flops(lambda w, x: jnp.sum(jnp.tanh(x @ w)), w, x) == 3 * 2 * 8 * 3 * 5
    True

    Args:
      loss: a function such as `Task.loss`, outside shard_map: inside, products have the shapes of
        one device's part.
      *args: the function's arguments, or their shapes and dtypes.

    Raises:
      ValueError: see `matrix_flops`.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    return 3 * matrix_flops(jax.make_jaxpr(loss)(*shapes).jaxpr)


def matrix_flops(jaxpr: Jaxpr) -> int:
    """FLOPs of the matrix products and convolutions of a traced function.

    A scan counts as often as it runs; of a conditional's branches the largest counts, and of
    `lax.platform_dependent` the default. Padding and dilation of a convolution count too.
    Operations inside hand-written kernels are not seen.

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
            # ((contracted of left, of right), (batch of left, of right)); the output has all other
            # axes.
            (contracted, _), _ = params["dimension_numbers"]
            terms = math.prod(left[axis] for axis in contracted)
        else:
            # The kernel has the input channels of one group.
            terms = math.prod(right) // right[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(_shape(equation.outvars[0])) * terms
    # The jaxprs of jit, remat, loops, branches and custom derivatives are among the parameters.
    inner = [matrix_flops(part) for part in jaxprs_in_params(params)]
    if name == "while" and any(inner):
        raise ValueError("a matrix product is in a while loop, whose length is not known before")
    if name == "cond":
        # A form for one platform may do more than the model asks for; the default's entry is None.
        by_platform = params.get("branches_platforms") or ()
        return inner[by_platform.index(None)] if None in by_platform else max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)
