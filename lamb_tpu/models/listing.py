"""Counts the costs of a network: its parameters, and the multiply-adds of one input."""

from typing import Any

import jax
import jax.numpy as jnp

from lamb_tpu import models
from lamb_tpu.cost.flops import matrix_flops
from lamb_tpu.models.costs import Description

# Input sizes for networks that take any size.
_GREY = (28, 28, 1)
_TOKENS, _MASKED, _STEPS = 128, 20, 20


def describe(name: str) -> Description:
    """Counts the costs of a network in `models.MODULES` by tracing it, without running it.

    >>> describe("lenet5")
    Description(name='lenet5', parameters=61706, multiply_adds=416520, input_shape=(28, 28, 1))
    """
    model = models.build(name)
    shape: tuple[int, ...] = (_TOKENS,)
    tokens = jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32)
    inputs: Any
    if model.carry_shape is not None:
        shape = (_STEPS,)
        inputs = {"inputs": jax.ShapeDtypeStruct((1, _STEPS), jnp.int32)}
    elif model.decode is not None:
        length = jax.ShapeDtypeStruct((1,), jnp.int32)
        # The target has the same number of words to predict, after a start token.
        target = jax.ShapeDtypeStruct((1, _TOKENS + 1), jnp.int32)
        inputs = {"source_ids": tokens, "source_length": length, "target_ids": target}
    elif model.vocab_size is None:
        size = getattr(models.MODULES[name], "image_size", None)
        shape = (size, size, 3) if size else _GREY
        inputs = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    else:
        inputs = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), tokens)
        inputs["masked_positions"] = jax.ShapeDtypeStruct((1, _MASKED), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
    traced = jax.make_jaxpr(lambda v, x: model.apply(v, x, train=False)[0])(variables, inputs)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    # `matrix_flops` counts a multiply-add as two operations.
    return Description(name, parameters, matrix_flops(traced.jaxpr) // 2, shape)
