"""LeNet: the network of the LAMB paper's MNIST table, and the smaller LeNet-5 it descends from."""

import functools

import flax.linen as nn
import jax

from lamb_tpu.models.convolution import convolve
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.pooling import max_pool_2x2

# Keras' default, which the author's code uses; Linen's is LeCun's normal.
_KERNEL_INIT = nn.initializers.glorot_uniform()
_Conv = functools.partial(nn.Conv, kernel_init=_KERNEL_INIT, conv_general_dilated=convolve)


class LeNet(nn.Module):
    """5x5 convolutions of 32 and 64 channels, a dense layer of 1,024 units, dropout 0.4.

    For 28x28x1 inputs 3,274,634 parameters: the network of the TensorFlow MNIST tutorial that the
    LAMB author tuned (github.com/fastalgo/mnist_tpu, lamb/mnist_tpu.py).

    Attributes:
      num_classes: width of the output.
      dropout_rate: share of the dense layer's units dropped in training.
    """

    num_classes: int = 10
    dropout_rate: float = 0.4

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Logits of shape (batch, num_classes) for images (batch, height, width, channels)."""
        if any(size % 4 for size in inputs.shape[1:3]):
            raise ValueError(f"LeNet needs height and width divisible by 4, not {inputs.shape[1:]}")
        x = inputs
        for index, channels in enumerate((32, 64), start=1):
            conv = _Conv(channels, (5, 5), name=f"conv{index}")
            x = max_pool_2x2(nn.relu(conv(x)))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(1024, kernel_init=_KERNEL_INIT, name="dense")(x))
        x = Dropout(self.dropout_rate)(x, train)
        return nn.Dense(self.num_classes, kernel_init=_KERNEL_INIT, name="output")(x)


class LeNet5(nn.Module):
    """LeCun et al. (1998), with ReLU and max pooling: 61,706 parameters for 28x28x1 inputs.

    Attributes:
      num_classes: width of the output.
    """

    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Logits of shape (batch, num_classes) for images (batch, height, width, channels)."""
        del train
        if min(inputs.shape[1:3]) < 12:
            raise ValueError(f"LeNet-5 needs images of 12x12 or more, not {inputs.shape[1:]}")
        x = _Conv(6, (5, 5), padding="SAME", name="conv1")(inputs)
        x = max_pool_2x2(nn.relu(x))
        x = _Conv(16, (5, 5), padding="VALID", name="conv2")(x)
        x = max_pool_2x2(nn.relu(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(120, kernel_init=_KERNEL_INIT, name="dense1")(x))
        x = nn.relu(nn.Dense(84, kernel_init=_KERNEL_INIT, name="dense2")(x))
        return nn.Dense(self.num_classes, kernel_init=_KERNEL_INIT, name="output")(x)
