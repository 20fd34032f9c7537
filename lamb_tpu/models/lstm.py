"""An LSTM layer, and a network with one LSTM layer that reads an image row by row."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.kernels import recurrence
from lamb_tpu.kernels.product import dot_general
from lamb_tpu.kernels.recurrence import GATES, Carry, Kernels
from lamb_tpu.models.promotion import Dense


class LSTM(nn.Module):
    """A layer of Hochreiter and Schmidhuber's memory cells with forget gates, without peepholes.

    Parameters are `input_kernel` (inputs, 4 features), `hidden_kernel` (features, 4 features) and
    `bias` (4 features), each with the gates in the order input, forget, cell, output.

    PyTorch's nn.LSTM has two biases; their sum corresponds to `bias`. Each of the two gets the
    full gradient, so their sum moves twice as far in an update. TensorFlow's BasicLSTMCell has one
    kernel, with the rows of the inputs above those of the hidden state and the gates in the order
    input, cell, forget, output. It adds `forget_bias` in every step, whereas here `forget_bias` is
    part of the forget gates' initial bias.

    Attributes:
      features: number of cells.
      init_scale: kernels and bias are drawn uniformly from (-init_scale, init_scale); None for
        1 / sqrt(features), which is PyTorch's default.
      forget_bias: added to the forget gates' initial bias.
      reverse: whether to read from the last step to the first.
      dtype: dtype of the operands of matrix products; None for the dtype of the inputs.
    """

    features: int
    init_scale: float | None = None
    forget_bias: float = 0.0
    reverse: bool = False
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        carry: Carry | None = None,
        valid: jax.Array | None = None,
        factor: jax.Array | None = None,
    ) -> tuple[jax.Array, Carry]:
        """Returns outputs (steps, batch, features), and the carry after the last step.

        Args:
          inputs: (steps, batch, inputs).
          carry: the carry before the first step; None for zeros.
          valid: (steps, batch), False at padding, where the carry does not change.
          factor: (batch, features), multiplied with the hidden state before each step's matrix
            product, such as a dropout mask; None for 1.
        """
        scale = self.features**-0.5 if self.init_scale is None else self.init_scale
        uniform = uniform_within(scale)

        def bias_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            forget = np.repeat([0.0, self.forget_bias, 0.0, 0.0], self.features)
            return uniform(key, shape, dtype) + jnp.asarray(forget, dtype)

        width = GATES * self.features
        kernel = self.param("input_kernel", uniform, (inputs.shape[-1], width), jnp.float32)
        hidden = self.param("hidden_kernel", uniform, (self.features, width), jnp.float32)
        bias = self.param("bias", bias_init, (width,), jnp.float32)
        dtype = self.dtype or inputs.dtype
        kernels = Kernels(kernel.astype(dtype), hidden.astype(dtype), bias)
        mask = jnp.ones(inputs.shape[:2], bool) if valid is None else valid
        if self.reverse:
            inputs, mask = inputs[::-1], mask[::-1]
        if carry is None:
            carry = recurrence.zero_carry(inputs, self.features, bias.dtype)
        outputs, last = recurrence.run(inputs, kernels, carry, mask, factor)
        return (outputs[::-1] if self.reverse else outputs), last


def uniform_within(scale: float) -> nn.initializers.Initializer:
    """Returns an initializer that draws uniformly from (-scale, scale)."""

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -scale, scale)

    return init


def uniform_dense(
    features: int, scale: float, dtype: str, name: str, use_bias: bool = True
) -> nn.Dense:
    """Returns a dense layer with initial values from `uniform_within`; its outputs are at least float32."""
    # By default, products of bfloat16 are rounded to bfloat16.
    wide = np.promote_types(jnp.dtype(dtype), jnp.float32)
    return Dense(
        features,
        use_bias=use_bias,
        kernel_init=uniform_within(scale),
        bias_init=uniform_within(scale),
        dtype=jnp.dtype(dtype),
        dot_general=functools.partial(dot_general, preferred_element_type=wide),
        name=name,
    )


class RowLSTM(nn.Module):
    """An LSTM that reads an image row by row, and a dense layer on its last output.

    This is the first of the four applications in the LEGW paper (arXiv:1901.08256), with 28 rows of
    28 pixels and 128 cells. The dense layer on each row before the LSTM is from memory of the paper and
    has not been verified.

    Attributes:
      num_classes: width of the output.
      features: number of cells.
      transform: width of a dense layer on each row before the LSTM; 0 for none.
      init_scale, forget_bias: see `LSTM`.
    """

    num_classes: int = 10
    features: int = 128
    transform: int = 128
    init_scale: float | None = None
    forget_bias: float = 0.0

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Returns logits (batch, num_classes) for images (batch, height, width, channels)."""
        del train
        batch, height = inputs.shape[:2]
        rows = inputs.reshape(batch, height, -1).swapaxes(0, 1)
        if self.transform:
            rows = nn.Dense(self.transform, name="transform")(rows)
        layer = LSTM(self.features, self.init_scale, self.forget_bias, name="lstm")
        _, last = layer(rows)
        return nn.Dense(self.num_classes, name="output")(last.hidden)
