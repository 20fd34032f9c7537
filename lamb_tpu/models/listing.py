"""What each network costs: its parameters, and the multiply-adds of one input."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lamb_tpu import models
from lamb_tpu.flops import matrix_flops

# Sizes for networks that take any.
_GREY = (28, 28, 1)
_TOKENS, _MASKED = 128, 20


class Description(NamedTuple):
    """A network with the fields that it has by default.

    Attributes:
      name: as in config.model.name.
      parameters: without BatchNorm's running averages.
      multiply_adds: of the forward pass of one input, in convolutions and dense layers (of BERT
        also in the products of attention), padding counted as pixels: half of
        `flops.matrix_flops`.
      input_shape: (height, width, channels) of an image, or (tokens,).
    """

    name: str
    parameters: int
    multiply_adds: int
    input_shape: tuple[int, ...]


def describe(name: str) -> Description:
    """Describes one of `models.MODULES`. Nothing is computed: the network is traced.

    >>> describe("lenet5")
    Description(name='lenet5', parameters=61706, multiply_adds=416520, input_shape=(28, 28, 1))
    """
    model = models.build(name)
    if model.vocab_size is None:
        size = getattr(models.MODULES[name], "image_size", None)
        shape = (size, size, 3) if size else _GREY
        inputs: Any = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    else:
        shape = (_TOKENS,)
        tokens = jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32)
        inputs = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), tokens)
        inputs["masked_positions"] = jax.ShapeDtypeStruct((1, _MASKED), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
    traced = jax.make_jaxpr(lambda v, x: model.apply(v, x, train=False)[0])(variables, inputs)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    return Description(name, parameters, matrix_flops(traced.jaxpr) // 2, shape)


def table(descriptions: list[Description]) -> str:
    """Lines to print, one a network.

    >>> print(table([describe("lenet5")]))
    model   parameters  multiply-adds  input
    lenet5      61,706        416,520  28 x 28 x 1
    """
    rows = [("model", "parameters", "multiply-adds", "input")]
    for name, parameters, multiply_adds, shape in descriptions:
        size = " x ".join(map(str, shape)) if len(shape) > 1 else f"{shape[0]} tokens"
        rows.append((name, f"{parameters:,}", f"{multiply_adds:,}", size))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}"
        for row in rows
    )
