"""A small convolutional network with BatchNorm; the shipped ones are too large for thousands of runs."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.kernels.convolution import convolve
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.norm import BatchNorm

NAME = "tests.fuzz.networks:ConvNet"


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm and ReLU, the mean over positions, dropout and a dense layer.

    Attributes:
      num_classes: width of the output.
      width: number of channels.
      dropout_rate: fraction of the means dropped in training.
      dtype: dtype of the convolutions.
      group_size, axis_name: see `norm.BatchNorm`.
    """

    num_classes: int = 10
    width: int = 4
    dropout_rate: float = 0.0
    dtype: str = "float32"
    group_size: int | None = None
    axis_name: str | Sequence[str] | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Returns float32 logits (batch, num_classes) for images (batch, height, width, channels)."""
        x = inputs.reshape(len(inputs), 8, 8, 1).astype(self.dtype)
        for index, stride in enumerate((1, 2)):
            x = nn.Conv(
                self.width,
                (3, 3),
                strides=stride,
                use_bias=False,
                dtype=jnp.dtype(self.dtype),
                conv_general_dilated=convolve,
                name=f"conv{index}",
            )(x)
            norm = BatchNorm(
                self.group_size, not train, self.axis_name, momentum=0.9, name=f"norm{index}"
            )
            x = nn.relu(norm(x))
        x = Dropout(self.dropout_rate, name="dropout")(x.mean((1, 2)), train)
        return nn.Dense(self.num_classes, name="output")(x.astype(jnp.float32))
