"""Model FLOPs: the arithmetic that training a model asks for, counted before anything is compiled.

Counted are matrix products and convolutions, two operations for each multiplication with its
addition, as the forward pass writes them; the rest (activations, norms, softmax, look-ups of
embeddings, the optimizer) is little beside them. Training takes three times that: the backward pass
has a product for the gradient of each of the two factors. What is computed again to save memory,
what a device computes besides and how the batch is cut or spread change nothing. So FLOPs over time
and over what the devices could do at their peak, the model FLOP/s utilisation (MFU), compares
different programs for one model. For a Transformer of L layers with H heads of width Q on sequences
of T tokens that is the usual 6 N + 12 L H Q T for each token, N being its parameters in matrices.
Here parameters count as often as a product uses them: those of an
embedding only where it is one, those of a head only at the places that it looks at.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def training_flops(loss: Callable[..., Any], *args: Any) -> int:
    """FLOPs of a value of a function and of its gradient: three times those of the value.

    Nothing is computed: the function is traced.

    >>> import jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((8, 3), jnp.float32), jax.ShapeDtypeStruct((3, 5), jnp.float32)
    >>> training_flops(lambda w, x: jnp.sum(jnp.tanh(x @ w)), w, x) == 3 * 2 * 8 * 3 * 5
    True

    Args:
      loss: such as `Task.loss`; outside shard_map, as products there have the shapes of a part.
      *args: its arguments, or their shapes and dtypes.

    Raises:
      ValueError: see `matrix_flops`.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    return 3 * matrix_flops(jax.make_jaxpr(loss)(*shapes).jaxpr)


def matrix_flops(jaxpr: Jaxpr) -> int:
    """FLOPs of the matrix products and convolutions of a traced function.

    A scan counts as often as it runs, of branches the largest. Places that a convolution pads or
    dilates count too. What a hand-written kernel does is not seen.

    Raises:
      ValueError: a product in a loop of which only its run tells how often it runs.
    """
    return sum(map(_flops, jaxpr.eqns))


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _flops(equation: JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "conv_general_dilated"):
        left, right = map(_shape, equation.invars)
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            terms = math.prod(left[axis] for axis in contracted)
        else:
            # The kernel has the input channels of one group.
            terms = math.prod(right) // right[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(_shape(equation.outvars[0])) * terms
    inner = [matrix_flops(part) for part in jaxprs_in_params(params)]
    if name == "while" and any(inner):
        raise ValueError("a matrix product is in a while loop, whose length is not known before")
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)
