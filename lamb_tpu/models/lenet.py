"""LeNet, the network of the LAMB paper's MNIST table, and its smaller ancestor LeNet-5."""

import functools

import flax.linen as nn
import jax

from lamb_tpu.errors import ArgumentError
from lamb_tpu.kernels.convolution import convolve
from lamb_tpu.kernels.pooling import max_pool_2x2
from lamb_tpu.models.dropout import Dropout

# Keras's default, which the author's code uses; Linen's default is LeCun's normal.
_KERNEL_INIT = nn.initializers.glorot_uniform()
_Conv = functools.partial(nn.Conv, kernel_init=_KERNEL_INIT, conv_general_dilated=convolve)


class LeNet(nn.Module):
    """5x5 convolutions of 32 and 64 channels, a dense layer of 1,024 units, dropout 0.4.

    The network has 3,274,634 parameters for 28x28x1 inputs. It is the network of TensorFlow's MNIST
    tutorial, as in the LAMB author's code (github.com/fastalgo/mnist_tpu, lamb/mnist_tpu.py).

    The dropout applies to the dense layer's units.
    """

    num_classes: int = 10
    dropout_rate: float = 0.4

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Returns logits (batch, num_classes) for images (batch, height, width, channels).

        Raises:
          ValueError: height or width of the images is not a multiple of 4.
        """
        if any(size % 4 for size in inputs.shape[1:3]):
            problem = f"cannot process images of shape {inputs.shape[1:]}"
            remedy = "use height and width divisible by 4"
            raise ArgumentError("the network LeNet", ..., problem, remedy)
        x = inputs
        for index, channels in enumerate((32, 64), start=1):
            conv = _Conv(channels, (5, 5), name=f"conv{index}")
            x = max_pool_2x2(nn.relu(conv(x)))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(1024, kernel_init=_KERNEL_INIT, name="dense")(x))
        x = Dropout(self.dropout_rate)(x, train)
        return nn.Dense(self.num_classes, kernel_init=_KERNEL_INIT, name="output")(x)


class LeNet5(nn.Module):
    """LeNet-5 of LeCun et al. (1998), with ReLU and max pooling.

    The network has 61,706 parameters for 28x28x1 inputs.
    """

    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Returns logits (batch, num_classes) for images (batch, height, width, channels).

        Raises:
          ValueError: the images are smaller than 12x12.
        """
        del train
        if min(inputs.shape[1:3]) < 12:
            problem = f"cannot process images of shape {inputs.shape[1:]}"
            raise ArgumentError("the network LeNet-5", ..., problem, "use at least 12x12 pixels")
        x = _Conv(6, (5, 5), padding="SAME", name="conv1")(inputs)
        x = max_pool_2x2(nn.relu(x))
        x = _Conv(16, (5, 5), padding="VALID", name="conv2")(x)
        x = max_pool_2x2(nn.relu(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(120, kernel_init=_KERNEL_INIT, name="dense1")(x))
        x = nn.relu(nn.Dense(84, kernel_init=_KERNEL_INIT, name="dense2")(x))
        return nn.Dense(self.num_classes, kernel_init=_KERNEL_INIT, name="output")(x)
