"""ResNet v1.5, as in MLPerf and torchvision, for photographs and for small images."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.models.convolution import convolve
from lamb_tpu.models.norm import BatchNorm
from lamb_tpu.models.pooling import max_pool_3x3

STEMS = ("imagenet", "cifar")
# He et al. (2015) by the outputs. torchvision does the same.
_CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_OUTPUT_INIT = nn.initializers.normal(0.01)


def _conv(channels: int, kernel: int, stride: int, dtype: Any, name: str) -> nn.Conv:
    """Returns a convolution without bias, padded equally on both sides (unlike TensorFlow's SAME)."""
    return nn.Conv(
        channels,
        (kernel, kernel),
        stride,
        padding=kernel // 2,
        use_bias=False,
        dtype=dtype,
        kernel_init=_CONV_INIT,
        conv_general_dilated=convolve,
        name=name,
    )


class Block(nn.Module):
    """A residual branch of convolutions, each with BatchNorm, and its shortcut.

    Attributes:
      layers: (kernel, channels) of each convolution of the branch.
      stride: stride of the first 3x3 convolution and of the shortcut; in v1 a bottleneck has it in
        its first 1x1 convolution.
      norm: makes a BatchNorm.
      dtype: dtype of the convolutions.
      zero_gamma: see `ResNet`.
    """

    layers: Sequence[tuple[int, int]]
    stride: int
    norm: Callable[..., BatchNorm]
    dtype: Any
    zero_gamma: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, height, width, channels) to the same, smaller by the stride."""
        y, shortcut, stride, last = x, x, self.stride, len(self.layers)
        for index, (kernel, channels) in enumerate(self.layers, start=1):
            y = _conv(channels, kernel, stride if kernel == 3 else 1, self.dtype, f"conv{index}")(y)
            # A basic block has two 3x3 convolutions, of which only the first has the stride.
            if kernel == 3:
                stride = 1
            if index < last:
                y = nn.relu(self.norm(name=f"norm{index}")(y))
        zeros, ones = nn.initializers.zeros, nn.initializers.ones
        y = self.norm(scale_init=zeros if self.zero_gamma else ones, name=f"norm{last}")(y)
        # True for the first block of a stage, except where neither size nor width changes.
        if shortcut.shape != y.shape:
            projection = _conv(y.shape[-1], 1, self.stride, self.dtype, "projection")
            shortcut = self.norm(name="projection_norm")(projection(shortcut))
        return nn.relu(y + shortcut)


class ResNet(nn.Module):
    """ResNet of He et al. (2016), in the variant v1.5: bottlenecks stride in their 3x3 convolution.

    Convolutions compute in `dtype`; BatchNorm's statistics, the pooled features and the logits are
    float32. Weights are initialised as in Goyal et al., the output's with standard deviation 0.01.

    Attributes:
      num_classes: width of the output.
      stem: 'imagenet', a 7x7 convolution of stride 2 and 3x3 max pooling of stride 2; or 'cifar', a
        3x3 convolution alone, for images of 32x32 or 64x64.
      zero_gamma: initialise the last scale of a branch to 0, so that every block starts as its
        shortcut (Goyal et al.; MLPerf); torchvision initialises it to 1.
      dtype: 'float32' or 'bfloat16': dtype of the convolutions and of the activations.
      group_size: examples per group of BatchNorm; None for the whole batch.
      axis_name: inside shard_map or pmap the mesh axes that split the batch; None under jit.
      momentum, epsilon: arguments of BatchNorm, by default as in MLPerf and torchvision.

    References:
      He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385.
      Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677.
    """

    blocks: ClassVar[tuple[int, ...]]
    bottleneck: ClassVar[bool]
    image_size: ClassVar[int] = 224

    num_classes: int = 1000
    stem: str = "imagenet"
    zero_gamma: bool = True
    dtype: str = "float32"
    group_size: int | None = None
    axis_name: str | Sequence[str] | None = None
    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Float32 logits (batch, num_classes) for images (batch, height, width, channels).

        Raises:
          ValueError: a field has an invalid value.
        """
        if self.stem not in STEMS:
            raise ValueError(f"stem is {self.stem!r}; known: {', '.join(STEMS)}")
        if type(self.zero_gamma) is not bool:
            raise ValueError(f"zero_gamma must be True or False, not {self.zero_gamma!r}")
        norm = functools.partial(
            BatchNorm, self.group_size, not train, self.axis_name, self.momentum, self.epsilon
        )
        photographs = self.stem == "imagenet"
        kernel, stride = (7, 2) if photographs else (3, 1)
        x = _conv(64, kernel, stride, self.dtype, "stem_conv")(inputs)
        x = nn.relu(norm(name="stem_norm")(x))
        if photographs:
            # Padded on both sides, as in torchvision. SAME would pad only at the end.
            x = max_pool_3x3(x)
        for stage, count in enumerate(self.blocks):
            width = 64 * 2**stage
            layers: tuple[tuple[int, int], ...] = ((3, width), (3, width))
            if self.bottleneck:
                layers = ((1, width), (3, width), (1, 4 * width))
            for index in range(count):
                # Each stage but the first halves the image in its first block.
                stride = 2 if stage > 0 and index == 0 else 1
                name = f"stage{stage + 1}_block{index + 1}"
                x = Block(layers, stride, norm, self.dtype, self.zero_gamma, name=name)(x)
        x = jnp.mean(x, (1, 2), dtype=jnp.float32)
        return nn.Dense(self.num_classes, kernel_init=_OUTPUT_INIT, name="output")(x)


class ResNet18(ResNet):
    """11,689,512 parameters for 1,000 classes."""

    blocks, bottleneck = (2, 2, 2, 2), False


class ResNet34(ResNet):
    """21,797,672 parameters for 1,000 classes."""

    blocks, bottleneck = (3, 4, 6, 3), False


class ResNet50(ResNet):
    """25,557,032 parameters for 1,000 classes."""

    blocks, bottleneck = (3, 4, 6, 3), True


class ResNet101(ResNet):
    """44,549,160 parameters for 1,000 classes."""

    blocks, bottleneck = (3, 4, 23, 3), True


class ResNet152(ResNet):
    """60,192,808 parameters for 1,000 classes."""

    blocks, bottleneck = (3, 8, 36, 3), True
