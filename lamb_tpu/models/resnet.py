"""ResNet v1.5, as in MLPerf and torchvision, for ImageNet-sized and small images."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.errors import ArgumentError, listed
from lamb_tpu.kernels.convolution import convolve
from lamb_tpu.kernels.pooling import max_pool_3x3
from lamb_tpu.models.norm import BatchNorm

STEMS = ("imagenet", "cifar")
# Initialisation of He et al. (2015) with fan_out, as in torchvision.
_CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_OUTPUT_INIT = nn.initializers.normal(0.01)


def _conv(channels: int, kernel: int, stride: int, dtype: Any, name: str) -> nn.Conv:
    """Returns a convolution without bias; unlike 'SAME', it pads equally on both sides."""
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
      layers: (kernel, channels) of each convolution in the branch.
      stride: stride of the first 3x3 convolution and of the shortcut. (In v1, a bottleneck has the
        stride in its first 1x1 convolution.)
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
        """Applies the block to (batch, height, width, channels)."""
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
        # The shapes differ in the first block of a stage if it changes the image size or the width.
        if shortcut.shape != y.shape:
            projection = _conv(y.shape[-1], 1, self.stride, self.dtype, "projection")
            shortcut = self.norm(name="projection_norm")(projection(shortcut))
        return nn.relu(y + shortcut)


class ResNet(nn.Module):
    """ResNet of He et al. (2016), version 1.5: bottlenecks have the stride in the 3x3 convolution.

    Convolutions compute in `dtype`; BatchNorm's statistics, the pooled features and the logits are
    float32. Weights are initialised as in Goyal et al., with standard deviation 0.01 in the output
    layer.

    Attributes:
      num_classes: width of the output.
      stem: 'imagenet' for a 7x7 convolution with stride 2 and 3x3 max pooling with stride 2; or
        'cifar' for only a 3x3 convolution, for images of 32x32 or 64x64 pixels.
      zero_gamma: initialise the scale of a branch's last BatchNorm to 0, so that every block starts
        as its shortcut (Goyal et al.; MLPerf); torchvision initialises it to 1.
      dtype: dtype of the convolutions and of the activations, 'float32' or 'bfloat16'.
      group_size, axis_name, momentum, epsilon: see `norm.BatchNorm`; momentum and epsilon have the
        defaults of MLPerf and torchvision.

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
        """Returns float32 logits (batch, num_classes) for images (batch, height, width, channels).

        Raises:
          ValueError: a field has an invalid value, or `group_size` does not fit the batch.
        """
        if self.stem not in STEMS:
            raise ArgumentError("stem", self.stem, "is unknown", f"use {listed(STEMS)}")
        if type(self.zero_gamma) is not bool:
            problem = "has the wrong type"
            raise ArgumentError("zero_gamma", self.zero_gamma, problem, "use True or False")
        norm = functools.partial(
            BatchNorm, self.group_size, not train, self.axis_name, self.momentum, self.epsilon
        )
        has_large_images = self.stem == "imagenet"
        kernel, stride = (7, 2) if has_large_images else (3, 1)
        x = _conv(64, kernel, stride, self.dtype, "stem_conv")(inputs)
        x = nn.relu(norm(name="stem_norm")(x))
        if has_large_images:
            # Pads on both sides, as in torchvision; 'SAME' would only pad at the end.
            x = max_pool_3x3(x)
        for stage, count in enumerate(self.blocks):
            width = 64 * 2**stage
            layers: tuple[tuple[int, int], ...] = ((3, width), (3, width))
            if self.bottleneck:
                layers = ((1, width), (3, width), (1, 4 * width))
            for index in range(count):
                # The first block of every stage except the first stage halves the image size.
                stride = 2 if stage > 0 and index == 0 else 1
                name = f"stage{stage + 1}_block{index + 1}"
                x = Block(layers, stride, norm, self.dtype, self.zero_gamma, name=name)(x)
        x = jnp.mean(x, (1, 2), dtype=jnp.float32)
        return nn.Dense(self.num_classes, kernel_init=_OUTPUT_INIT, name="output")(x)


def _sized(layers: int, blocks: tuple[int, ...], parameters: str) -> type[ResNet]:
    """Returns the network of a published depth; networks with 50 or more layers have bottlenecks."""
    fields = {
        "__doc__": f"ResNet-{layers}, with {parameters} parameters for 1,000 classes.",
        "__module__": __name__,
        "blocks": blocks,
        "bottleneck": layers >= 50,
    }
    return type(f"ResNet{layers}", (ResNet,), fields)


ResNet18 = _sized(18, (2, 2, 2, 2), "11,689,512")
ResNet34 = _sized(34, (3, 4, 6, 3), "21,797,672")
ResNet50 = _sized(50, (3, 4, 6, 3), "25,557,032")
ResNet101 = _sized(101, (3, 4, 23, 3), "44,549,160")
ResNet152 = _sized(152, (3, 8, 36, 3), "60,192,808")
