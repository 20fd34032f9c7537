"""EfficientNet B0 to B7, as in the authors' code for TPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.kernels.lanes import Conv, examples_a_row, pack, unpack
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.norm import BatchNorm

# Untruncated normal with variance 2 / fan_out. For a depthwise kernel, the original's fan_out counts
# one output channel, and equals Linen's fan_in.
_CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_DEPTHWISE_INIT = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
# Uniform between -1 / sqrt(outputs) and 1 / sqrt(outputs).
_OUTPUT_INIT = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")


class BlockStage(NamedTuple):
    """Consecutive blocks of the same width, before scaling; only the first block has the stride."""

    count: int  # type: ignore[assignment]
    kernel: int
    stride: int
    expansion: int
    channels: int


# Channels of the first and the last convolution, before scaling.
STEM, HEAD = 32, 1280
# Blocks with up to this many expanded channels compute on packed examples. In the TPU compiler's
# estimates for v3, packing saves 40 % of a block's time at 144 channels, 9 % at 240 and 2 % at 384,
# and adds 4 % at 528.
_PACKED_CHANNELS = 384
STAGES = (
    BlockStage(count=1, kernel=3, stride=1, expansion=1, channels=16),
    BlockStage(count=2, kernel=3, stride=2, expansion=6, channels=24),
    BlockStage(count=2, kernel=5, stride=2, expansion=6, channels=40),
    BlockStage(count=3, kernel=3, stride=2, expansion=6, channels=80),
    BlockStage(count=3, kernel=5, stride=1, expansion=6, channels=112),
    BlockStage(count=4, kernel=5, stride=2, expansion=6, channels=192),
    BlockStage(count=1, kernel=3, stride=1, expansion=6, channels=320),
)


def scaled_channels(channels: int, width: float) -> int:
    """Rounds channels * width to the nearest multiple of 8, or up if that would lose over 10 %.

    >>> [scaled_channels(channels, 1.1) for channels in (32, 16, 24, 1280)]
    [32, 16, 24, 1408]
    """
    scaled = channels * width
    nearest = max(8, int(scaled + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * scaled else nearest


class SqueezeExcite(nn.Module):
    """Multiplies each channel of an example by a gate: two dense layers map channel means to gates.

    The first layer has `reduced` outputs. In the original, both layers are 1x1 convolutions of a
    single pixel.
    """

    reduced: int
    dtype: Any
    packed: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch / packed, height, width, packed x channels) to the same shape."""
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=_CONV_INIT)
        means = jnp.mean(x, (1, 2), dtype=jnp.float32).reshape(len(x) * self.packed, -1)
        # (batch, channels): one row per example, even if examples are packed.
        gates = dense(means.shape[-1], name="expand")(
            nn.swish(dense(self.reduced, name="reduce")(means))
        )
        return x * nn.sigmoid(gates).reshape(len(x), 1, 1, -1)


class Block(nn.Module):
    """MBConv: a 1x1 expansion, a depthwise convolution, squeeze-excite, and a 1x1 projection.

    Attributes:
      channels: channels of the output.
      kernel, stride: size and stride of the depthwise convolution.
      expansion: ratio of inner channels to input channels; 1 omits the first convolution.
      stochastic_depth_rate: fraction of examples whose branch is dropped in a block with a shortcut.
      packed: number of examples per row, see `lamb_tpu.kernels.lanes`.
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
        """Applies the block to (batch / packed, height, width, packed x channels)."""
        channels = inputs.shape[-1] // self.packed
        width = channels * self.expansion
        conv = functools.partial(Conv, dtype=self.dtype, kernel_init=_CONV_INIT, packed=self.packed)
        norm = functools.partial(self.norm, packed=self.packed)
        x = inputs
        if self.expansion != 1:
            x = conv(width, 1, 1, name="expand")(x)
            x = nn.swish(norm(name="expand_norm")(x))
        depthwise = functools.partial(conv, kernel_init=_DEPTHWISE_INIT, depthwise=True)
        x = depthwise(width, self.kernel, self.stride, name="depthwise")(x)
        x = nn.swish(norm(name="depthwise_norm")(x))
        # A quarter of the input's channels, not of the expanded channels.
        reduced = max(1, channels // 4)
        x = SqueezeExcite(reduced, self.dtype, self.packed, name="squeeze_excite")(x)
        x = conv(self.channels, 1, 1, name="project")(x)
        x = norm(name="project_norm")(x)
        # Only a block that preserves the shape has a shortcut, so only its branch can be dropped.
        if self.stride == 1 and x.shape == inputs.shape:
            # Use one mask value per example, because packed examples share a row.
            ones = jnp.ones((len(x) * self.packed, channels))
            mask = Dropout(self.stochastic_depth_rate, whole_examples=True)(ones, train)
            mask = mask.reshape(len(x), 1, 1, -1)
            branch = x.astype(np.promote_types(x.dtype, mask.dtype)) * mask
            x = (branch + inputs.astype(branch.dtype)).astype(x.dtype)
        return x


class EfficientNet(nn.Module):
    """The network of Tan and Le (2019); its width, depth and image size are scaled together.

    Convolutions compute in `dtype`; BatchNorm's statistics, means over an image and the logits are
    float32. Padding is TensorFlow's SAME: an odd pixel goes to the right and to the bottom. On TPUs
    in shard_map the first blocks compute on packed examples, see `lamb_tpu.kernels.lanes`.

    Attributes:
      num_classes: width of the output.
      dropout_rate: fraction of the pooled features dropped in training.
      stochastic_depth_rate: rate of stochastic depth, which the original calls drop connect. Block
        i of n, counted from 0, has i / n times this rate.
      stages: the fields of each `BlockStage` before scaling; by default the original stages. A
        network with fewer stages compiles in seconds.
      dtype: dtype of the convolutions and of the activations, 'float32' or 'bfloat16'.
      group_size, axis_name, momentum, epsilon: see `norm.BatchNorm`; momentum and epsilon have the
        original's defaults.

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
        """Returns float32 logits (batch, num_classes) for images (batch, height, width, channels).

        Raises:
          ValueError: a rate is not in [0, 1), or `group_size` does not fit the batch.
        """
        norm = functools.partial(
            BatchNorm, self.group_size, not train, self.axis_name, self.momentum, self.epsilon
        )
        # The stem and the first blocks have few channels, so they compute on packed examples.
        packed = examples_a_row(len(inputs))
        x = pack(inputs, packed)
        conv = functools.partial(Conv, dtype=self.dtype, kernel_init=_CONV_INIT)
        stem = scaled_channels(STEM, self.width)
        x = conv(stem, size=3, stride=2, packed=packed, name="stem_conv")(x)
        x = nn.swish(norm(packed=packed, name="stem_norm")(x))
        stages = [BlockStage(*stage) for stage in self.stages]
        counts = [math.ceil(stage.count * self.depth) for stage in stages]
        done = 0
        for number, (stage, count) in enumerate(zip(stages, counts, strict=True), start=1):
            channels = scaled_channels(stage.channels, self.width)
            for index in range(count):
                # The widths grow, so packing ends at the first block that is too wide. Afterwards
                # `unpack` with packed=1 changes nothing.
                if x.shape[-1] // packed * stage.expansion > _PACKED_CHANNELS:
                    x, packed = unpack(x, packed), 1
                x = Block(
                    channels=channels,
                    kernel=stage.kernel,
                    stride=stage.stride if index == 0 else 1,
                    expansion=stage.expansion,
                    # The rate rises linearly with the depth, as in Huang et al.
                    stochastic_depth_rate=self.stochastic_depth_rate * done / sum(counts),
                    norm=norm,
                    dtype=self.dtype,
                    packed=packed,
                    name=f"stage{number}_block{index + 1}",
                )(x, train)
                done += 1
        x = unpack(x, packed)
        head = scaled_channels(HEAD, self.width)
        x = conv(head, size=1, stride=1, name="head_conv")(x)
        x = nn.swish(norm(name="head_norm")(x))
        x = jnp.mean(x, (1, 2), dtype=jnp.float32)
        x = Dropout(self.dropout_rate)(x, train)
        return nn.Dense(self.num_classes, kernel_init=_OUTPUT_INIT, name="output")(x)


def _sized(
    name: str, width: float, depth: float, image_size: int, dropout_rate: float, parameters: str
) -> type[EfficientNet]:
    """Returns the network of a published size."""
    fields = {
        "__doc__": f"EfficientNet-{name}, with {parameters} parameters for 1,000 classes.",
        "__module__": __name__,
        "__annotations__": {"dropout_rate": float},
        "width": width,
        "depth": depth,
        "image_size": image_size,
        "dropout_rate": dropout_rate,
    }
    return type(f"EfficientNet{name}", (EfficientNet,), fields)


EfficientNetB0 = _sized("B0", 1.0, 1.0, 224, 0.2, "5,288,548")
EfficientNetB1 = _sized("B1", 1.0, 1.1, 240, 0.2, "7,794,184")
EfficientNetB2 = _sized("B2", 1.1, 1.2, 260, 0.3, "9,109,994")
EfficientNetB3 = _sized("B3", 1.2, 1.4, 300, 0.3, "12,233,232")
EfficientNetB4 = _sized("B4", 1.4, 1.8, 380, 0.4, "19,341,616")
EfficientNetB5 = _sized("B5", 1.6, 2.2, 456, 0.4, "30,389,784")
EfficientNetB6 = _sized("B6", 1.8, 2.6, 528, 0.5, "43,040,704")
EfficientNetB7 = _sized("B7", 2.0, 3.1, 600, 0.5, "66,347,960")
