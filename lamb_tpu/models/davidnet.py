"""DavidNet: the ResNet-9 of David Page's CIFAR-10 entry to DAWNBench."""

import functools
from collections.abc import Sequence
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.errors import ArgumentError
from lamb_tpu.kernels.convolution import convolve
from lamb_tpu.kernels.pooling import max_pool_2x2
from lamb_tpu.models.norm import BatchNorm

# PyTorch's default: uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs).
_KERNEL_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
# dawn.py multiplies the logits by this number.
_OUTPUT_SCALE = 0.125


class DavidNet(nn.Module):
    """3x3 convolutions of 64, 128, 256 and 512 channels, with residual branches at 128 and 512.

    The network has 6,573,120 parameters for 32x32x3 inputs. The original is dawn.py in
    github.com/davidcpage/cifar10-fast. The LAMB paper's CIFAR-10 table uses a TensorFlow version
    (github.com/fastalgo/davidnet-cifar). Without an accelerator, use a smaller `width`.

    BatchNorm and ReLU follow each convolution; a residual branch has two convolutions. Outside the
    branches, 2x2 max pooling follows the convolutions with 128 or more channels. The output layer
    has no bias, and the logits are multiplied by 0.125.

    Convolutions compute in `dtype`; BatchNorm's statistics and the logits are float32.

    Attributes:
      num_classes: width of the output.
      width: number of channels of the first convolution; the other convolutions have 2, 4 or 8 times
        this number.
      dtype: dtype of the convolutions and of the activations, 'float32' or 'bfloat16'.
      group_size, axis_name, momentum, epsilon: see `norm.BatchNorm`; momentum and epsilon have
        PyTorch's defaults.
    """

    image_size: ClassVar[int] = 32

    num_classes: int = 10
    width: int = 64
    dtype: str = "float32"
    group_size: int | None = None
    axis_name: str | Sequence[str] | None = None
    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Returns float32 logits (batch, num_classes) for images (batch, height, width, channels).

        Raises:
          ValueError: height or width of the images is not a multiple of 8, or `width` is below 1.
        """
        if self.width < 1:
            raise ArgumentError("width", self.width, "is out of range", "use at least 1")
        if any(size % 8 for size in inputs.shape[1:3]):
            problem = f"cannot process images of shape {inputs.shape[1:]}"
            remedy = "use height and width divisible by 8"
            raise ArgumentError("the network DavidNet", ..., problem, remedy)
        conv = functools.partial(
            nn.Conv,
            kernel_size=(3, 3),
            use_bias=False,
            dtype=self.dtype,
            kernel_init=_KERNEL_INIT,
            conv_general_dilated=convolve,
        )
        norm = functools.partial(
            BatchNorm, self.group_size, not train, self.axis_name, self.momentum, self.epsilon
        )

        def layer(x: jax.Array, channels: int, name: str) -> jax.Array:
            return nn.relu(norm(name=f"{name}_norm")(conv(channels, name=f"{name}_conv")(x)))

        x = layer(inputs, self.width, "prep")
        for index in (1, 2, 3):
            channels = self.width * 2**index
            x = max_pool_2x2(layer(x, channels, f"layer{index}"))
            # dawn.py only has residual branches at layers 1 and 3.
            if index != 2:
                branch = layer(x, channels, f"layer{index}_branch1")
                x = x + layer(branch, channels, f"layer{index}_branch2")
        # dawn.py has 4x4 max pooling, which is global for 32x32 images.
        x = jnp.max(x, (1, 2)).astype(jnp.float32)
        output = nn.Dense(self.num_classes, use_bias=False, kernel_init=_KERNEL_INIT, name="output")
        return _OUTPUT_SCALE * output(x)
