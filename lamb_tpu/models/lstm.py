"""LSTM layers, and a network of one that reads an image row by row."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.models import recurrence
from lamb_tpu.models.recurrence import GATES, Carry, Kernels


class LSTM(nn.Module):
    """A layer of Hochreiter and Schmidhuber's memory cells with forget gates, without peepholes.

    Parameters are `input_kernel` (inputs, 4 features), `hidden_kernel` (features, 4 features) and
    `bias` (4 features), each with the gates in the order input, forget, cell, output. PyTorch's
    nn.LSTM has two biases, whose sum is this one: each of them gets the whole gradient, so the sum
    moves twice as far in an update there. TensorFlow's BasicLSTMCell has one kernel, inputs above
    hidden, with the gates in the order input, cell, forget, output, and adds `forget_bias` in every
    step; here it is the forget gates' initial bias.

    Attributes:
      features: number of cells.
      init_scale: kernels and bias are drawn uniformly from (-init_scale, init_scale); None for
        1 / sqrt(features), which is PyTorch's default.
      forget_bias: added to the forget gates' initial bias.
      reverse: whether to read from the last step to the first.
      dtype: dtype of the matrix products' factors; None for that of the inputs.
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
        """Reads a sequence.

        Args:
          inputs: (steps, batch, inputs).
          carry: before the first step; None for zeros.
          valid: (steps, batch), False where a sequence is padded: there the carry stays. None for
            no padding.
          factor: of the hidden state in each step's matrix product, (batch, features), such as a
            mask of dropout; None for 1.

        Returns:
          Outputs (steps, batch, features), and the carry after the last step.
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


class RowLSTM(nn.Module):
    """An LSTM that reads an image row by row, and a dense layer on its last output.

    The first of the four applications of LEGW (arXiv:1901.08256): 28 rows of 28 pixels, 128 cells.
    The dense layer on each row before the LSTM is remembered from the paper, and not checked.

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
        """Logits of shape (batch, num_classes) for images (batch, height, width, channels)."""
        del train
        batch, height = inputs.shape[:2]
        rows = inputs.reshape(batch, height, -1).swapaxes(0, 1)
        if self.transform:
            rows = nn.Dense(self.transform, name="transform")(rows)
        layer = LSTM(self.features, self.init_scale, self.forget_bias, name="lstm")
        _, last = layer(rows)
        return nn.Dense(self.num_classes, name="output")(last.hidden)


def from_torch(weights: Mapping[str, np.ndarray], suffix: str = "_l0") -> dict[str, np.ndarray]:
    """Returns the parameters of `LSTM` for a layer of PyTorch's nn.LSTM.

    Args:
      weights: `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`, each with the suffix.
      suffix: of the layer, such as '_l1' or '_l0_reverse'.
    """
    return {
        "input_kernel": np.transpose(weights["weight_ih" + suffix]),
        "hidden_kernel": np.transpose(weights["weight_hh" + suffix]),
        "bias": weights["bias_ih" + suffix] + weights["bias_hh" + suffix],
    }


def to_tensorflow(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns `kernel` and `bias` of TensorFlow's BasicLSTMCell with forget_bias=0."""

    def reordered(array: np.ndarray) -> np.ndarray:
        i, f, g, o = np.split(np.asarray(array), GATES, axis=-1)
        return np.concatenate([i, g, f, o], axis=-1)

    kernel = np.concatenate([params["input_kernel"], params["hidden_kernel"]])
    return {"kernel": reordered(kernel), "bias": reordered(params["bias"])}


def to_torch(params: Mapping[str, np.ndarray], suffix: str = "_l0") -> dict[str, np.ndarray]:
    """Returns the weights of a layer of PyTorch's nn.LSTM; its second bias is zero."""
    return {
        "weight_ih" + suffix: np.transpose(params["input_kernel"]),
        "weight_hh" + suffix: np.transpose(params["hidden_kernel"]),
        "bias_ih" + suffix: np.asarray(params["bias"]),
        "bias_hh" + suffix: np.zeros_like(params["bias"]),
    }
