"""EfficientNet B0 to B7, as in their authors' code for TPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.lanes import Conv, examples_a_row, pack, unpack
from lamb_tpu.models.norm import BatchNorm

# A normal whose variance is 2 / outputs, not truncated; of a depthwise kernel the original counts
# one output.
_CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_DEPTHWISE_INIT = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
# Uniform within 1 / sqrt(outputs).
_OUTPUT_INIT = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")


class Stage(NamedTuple):
    """Blocks of one width, before scaling; only the first has the stride."""

    count: int  # type: ignore[assignment]
    kernel: int
    stride: int
    expansion: int
    channels: int


# Channels of the first and the last convolution, before scaling.
STEM, HEAD = 32, 1280
# Examples are packed in blocks of up to this many channels. By the TPU compiler's estimates for v3
# packing saves 40 % of a block's time at 144 channels, 9 % at 240 and 2 % at 384; at 528 it costs
# 4 %.
_PACKED_CHANNELS = 384
STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)


def scaled_channels(channels: int, width: float) -> int:
    """Rounds scaled channels to the nearest multiple of 8, or up if that is over 10 % less.

    >>> [scaled_channels(channels, 1.1) for channels in (32, 16, 24, 1280)]
    [32, 16, 24, 1408]
    """
    # `round_filters` of the original.
    scaled = channels * width
    nearest = max(8, int(scaled + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * scaled else nearest


def scaled_count(count: int, depth: float) -> int:
    """Returns the scaled number of blocks, rounded up."""
    # `round_repeats` of the original.
    return math.ceil(count * depth)


class SqueezeExcite(nn.Module):
    """Scales each channel of an example by two dense layers of the channels' means.

    In the original, the two layers are 1x1 convolutions of one pixel.

    Attributes:
      reduced: channels between the two layers.
      dtype: dtype of the two layers.
      packed: number of examples in a row, see `lamb_tpu.models.lanes`.
    """

    reduced: int
    dtype: Any
    packed: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch / packed, height, width, packed x channels), of the same dtype."""
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=_CONV_INIT)
        means = jnp.mean(x, (1, 2), dtype=jnp.float32).reshape(len(x) * self.packed, -1)
        # (batch, channels); one row for each example, also if examples are packed.
        gates = dense(means.shape[-1], name="expand")(
            nn.swish(dense(self.reduced, name="reduce")(means))
        )
        return x * nn.sigmoid(gates).reshape(len(x), 1, 1, -1)


class Block(nn.Module):
    """MBConv: expansion by a 1x1 convolution, a depthwise one, squeeze-excite, 1x1 projection.

    Attributes:
      channels: channels of the output.
      kernel, stride: size and stride of the depthwise convolution.
      expansion: channels within, as a multiple of the input's; 1 omits the first convolution.
      stochastic_depth_rate: share of the examples whose branch is dropped, if there is a shortcut.
      norm: makes a BatchNorm.
      dtype: dtype of the convolutions.
      packed: number of examples in a row, see `lamb_tpu.models.lanes`.
    """

    channels: int
    kernel: int
    stride: int
    expansion: int
    stochastic_depth_rate: float
    norm: Callable[..., BatchNorm]
    dtype: Any
    packed: int = 1

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """(batch / packed, height, width, packed x channels), smaller by the stride."""
        channels = inputs.shape[-1] // self.packed
        width = channels * self.expansion
        conv = functools.partial(Conv, packed=self.packed)
        norm = functools.partial(self.norm, packed=self.packed)
        x = inputs
        if self.expansion != 1:
            x = conv(width, 1, 1, self.dtype, _CONV_INIT, name="expand")(x)
            x = nn.swish(norm(name="expand_norm")(x))
        x = conv(
            width,
            self.kernel,
            self.stride,
            self.dtype,
            _DEPTHWISE_INIT,
            depthwise=True,
            name="depthwise",
        )(x)
        x = nn.swish(norm(name="depthwise_norm")(x))
        # A quarter of the block's input, not of the expanded channels.
        reduced = max(1, channels // 4)
        x = SqueezeExcite(reduced, self.dtype, self.packed, name="squeeze_excite")(x)
        x = conv(self.channels, 1, 1, self.dtype, _CONV_INIT, name="project")(x)
        x = norm(name="project_norm")(x)
        # Only a block that keeps the shape has a shortcut, so only its branch can be dropped.
        if self.stride == 1 and x.shape == inputs.shape:
            # Dropped for each example by itself, because examples may share a row.
            ones = jnp.ones((len(x) * self.packed, channels))
            kept = Dropout(self.stochastic_depth_rate, whole_examples=True)(ones, train)
            kept = kept.reshape(len(x), 1, 1, -1)
            branch = x.astype(np.promote_types(x.dtype, kept.dtype)) * kept
            x = (branch + inputs.astype(branch.dtype)).astype(x.dtype)
        return x


class EfficientNet(nn.Module):
    """Tan and Le (2019): a searched network, its width, depth and image size scaled together.

    Convolutions compute in `dtype`; BatchNorm's statistics, means over an image and the logits are
    float32. Padding is TensorFlow's SAME: an odd pixel goes to the right and to the bottom. On TPUs
    in shard_map the first blocks compute on packed examples, see `lamb_tpu.models.lanes`.

    Attributes:
      num_classes: width of the output.
      dropout_rate: share of the pooled features dropped in training.
      stochastic_depth_rate: rate of stochastic depth, which the original calls drop connect. The
        i-th of n blocks, counted from 0, has the rate i / n times this.
      stages: the fields of each `Stage`, before scaling; by default the original's. Fewer make a
        network that compiles in seconds.
      dtype: 'float32' or 'bfloat16': dtype of the convolutions and of the activations.
      group_size: examples per group of BatchNorm; None for the whole batch.
      axis_name: inside shard_map or pmap the mesh axes that split the batch; None under jit.
      momentum, epsilon: arguments of BatchNorm, by default the original's.

    References:
      Tan and Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks,
        arXiv:1905.11946; models/official/efficientnet of github.com/tensorflow/tpu.
      Huang et al., Deep Networks with Stochastic Depth, arXiv:1603.09382.
      Wongpanich et al., Training EfficientNets at Supercomputer Scale, arXiv:2011.00071.
    """

    width: ClassVar[float]
    depth: ClassVar[float]
    image_size: ClassVar[int]

    num_classes: int = 1000
    dropout_rate: float = 0.2
    stochastic_depth_rate: float = 0.2
    stages: Sequence[Sequence[int]] = STAGES
    dtype: str = "float32"
    group_size: int | None = None
    axis_name: str | Sequence[str] | None = None
    momentum: float = 0.99
    epsilon: float = 1e-3

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Float32 logits (batch, num_classes) for images (batch, height, width, channels).

        Raises:
          ValueError: a rate is not in [0, 1).
        """
        norm = functools.partial(
            BatchNorm, self.group_size, not train, self.axis_name, self.momentum, self.epsilon
        )
        # The stem and the first blocks have few channels and compute on packed examples.
        packed = examples_a_row(len(inputs))
        x = pack(inputs, packed)
        x = Conv(
            scaled_channels(STEM, self.width),
            3,
            2,
            self.dtype,
            _CONV_INIT,
            packed=packed,
            name="stem_conv",
        )(x)
        x = nn.swish(norm(packed=packed, name="stem_norm")(x))
        stages = [Stage(*stage) for stage in self.stages]
        counts = [scaled_count(stage.count, self.depth) for stage in stages]
        done = 0
        for number, (stage, count) in enumerate(zip(stages, counts, strict=True), start=1):
            channels = scaled_channels(stage.channels, self.width)
            for index in range(count):
                # The widths grow, so packing ends at the first block that is too wide. Unpacking
                # single examples changes nothing.
                if x.shape[-1] // packed * stage.expansion > _PACKED_CHANNELS:
                    x, packed = unpack(x, packed), 1
                x = Block(
                    channels,
                    stage.kernel,
                    stage.stride if index == 0 else 1,
                    stage.expansion,
                    # The rate rises linearly with the depth, as in Huang et al.
                    self.stochastic_depth_rate * done / sum(counts),
                    norm,
                    self.dtype,
                    packed,
                    name=f"stage{number}_block{index + 1}",
                )(x, train)
                done += 1
        x = unpack(x, packed)
        head = scaled_channels(HEAD, self.width)
        x = Conv(head, 1, 1, self.dtype, _CONV_INIT, name="head_conv")(x)
        x = nn.swish(norm(name="head_norm")(x))
        x = jnp.mean(x, (1, 2), dtype=jnp.float32)
        x = Dropout(self.dropout_rate)(x, train)
        return nn.Dense(self.num_classes, kernel_init=_OUTPUT_INIT, name="output")(x)


class EfficientNetB0(EfficientNet):
    """5,288,548 parameters for 1,000 classes."""

    width, depth, image_size = 1.0, 1.0, 224


class EfficientNetB1(EfficientNet):
    """7,794,184 parameters for 1,000 classes."""

    width, depth, image_size = 1.0, 1.1, 240


class EfficientNetB2(EfficientNet):
    """9,109,994 parameters for 1,000 classes."""

    width, depth, image_size = 1.1, 1.2, 260
    dropout_rate: float = 0.3


class EfficientNetB3(EfficientNet):
    """12,233,232 parameters for 1,000 classes."""

    width, depth, image_size = 1.2, 1.4, 300
    dropout_rate: float = 0.3


class EfficientNetB4(EfficientNet):
    """19,341,616 parameters for 1,000 classes."""

    width, depth, image_size = 1.4, 1.8, 380
    dropout_rate: float = 0.4


class EfficientNetB5(EfficientNet):
    """30,389,784 parameters for 1,000 classes."""

    width, depth, image_size = 1.6, 2.2, 456
    dropout_rate: float = 0.4


class EfficientNetB6(EfficientNet):
    """43,040,704 parameters for 1,000 classes."""

    width, depth, image_size = 1.8, 2.6, 528
    dropout_rate: float = 0.5


class EfficientNetB7(EfficientNet):
    """66,347,960 parameters for 1,000 classes."""

    width, depth, image_size = 2.0, 3.1, 600
    dropout_rate: float = 0.5
