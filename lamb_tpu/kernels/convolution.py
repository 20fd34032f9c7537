"""The convolution of this package's networks, in a form that is also fast on CPUs.

XLA's CPU backend has fast convolutions for only one order of axes, a single group and no dilation.
JAX's gradients use other orders and dilations, and take tens of times as long inside a loop, such as
the loop over microbatches. Depthwise convolutions and convolutions with 2x2 outputs are always slow,
forward and backward. Programs for CPUs therefore use other forms:

- The input's gradient is a convolution of the outputs' gradient, in the fast order. With a stride,
  the kernel's taps are divided into phases. All taps of a phase read the same set of pixels, which are
  one stride apart, so each phase is a separate convolution without stride.
- The kernel's gradient is a matrix product of patches, a few images at a time.
- If the kernel is depthwise or 1x1, or the output has few pixels, the convolution is a sum of
  products over the kernel's taps.
- If the input has up to three channels and there are few output channels, four neighbouring pixels
  of a row become the channels of one wide pixel, because XLA vectorises over channels. The kernel is
  copied four times, and each copy is shifted by one more pixel.

Programs for other devices use JAX's convolution. `python -m experiments.bench.convolution` measures
the speed.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.kernels import axes

_NHWC = ("NHWC", "HWIO", "NHWC")
_FAST_ORDER = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
_FEW_PIXELS = 9  # use sums up to this output size; from 16 pixels on convolutions are as fast
_FEW_CHANNELS, _FEW_OUTPUTS, _WIDE = 3, 16, 4  # limits for wide pixels; pixels per wide pixel
_PATCH_BYTES = 2**22  # size of the patches in one iteration, which stay in the cache


class _How(NamedTuple):
    """The arguments of a convolution; `pads` has the padding pixels (before, after) of each axis."""

    strides: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    groups: int


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] = (1, 1),
    rhs_dilation: Sequence[int] = (1, 1),
    dimension_numbers: lax.ConvDimensionNumbers | None = None,
    feature_group_count: int = 1,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Convolves images; use it as `conv_general_dilated` of `flax.linen.Conv`.

    Args:
      x: (batch, height, width, channels).
      kernel: (height, width, channels / feature_group_count, outputs), with the dtype of `x`.
      strides: strides of height and width.
      padding: 'SAME', 'VALID', or the pixels (before, after) for height and for width.
      lhs_dilation, rhs_dilation, dimension_numbers, precision: must have the defaults of
        `flax.linen.Conv`.
      feature_group_count: number of groups of channels that do not mix.

    Returns:
      (batch, height, width, outputs), differentiable in reverse mode.

    Raises:
      ValueError: a dilation other than 1, a precision, or an order of axes other than NHWC is given.
    """
    order = lax.conv_dimension_numbers(x.shape, kernel.shape, _NHWC)
    plain = {*lhs_dilation, *rhs_dilation} == {1} and precision is None
    if not plain or dimension_numbers not in (None, order):
        raise ValueError("convolve needs NHWC images, dilations of 1, and precision=None")
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    how = _How(
        tuple(strides), tuple((before, after) for before, after in padding), feature_group_count
    )
    return _convolve(x, kernel, how)


def are_fast_in_loops(program: str) -> bool:
    """Returns whether all convolutions of a program are as fast in a loop on a CPU as outside a loop.

    The program is StableHLO as text, lowered for a CPU. Convolutions from `convolve` are fast, and
    gradients of `jax.lax` convolutions are not.
    """
    lines = [line for line in program.splitlines() if "stablehlo.convolution" in line]
    return all(
        _FAST_ORDER in line
        and "feature_group_count = 1 " in line
        and {*re.findall(r"\d+", " ".join(re.findall(r"_dilate = \[(.*?)\]", line)))} <= {"1"}
        for line in lines
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve(x: jax.Array, kernel: jax.Array, how: _How) -> jax.Array:
    on_cpu = _sums if _has_sums(x, kernel, how) else _lax
    if _is_widened(x, kernel, how):
        on_cpu = _widened
    return lax.platform_dependent(
        x,
        kernel,
        cpu=lambda x, kernel: on_cpu(x, kernel, how),
        default=lambda x, kernel: _lax(x, kernel, how),
    )


def _forward(
    x: jax.Array, kernel: jax.Array, how: _How
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(x, kernel, how), (x, kernel)


def _backward(
    how: _How, inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def derived(
        convolution: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(lambda *both: convolution(*both, how), x, kernel)[1](gradient)

    def on_cpu(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        if _is_widened(x, kernel, how):
            return derived(_widened, x, kernel, gradient)
        if how.groups == 1 and _has_sums(x, kernel, how):
            return derived(_sums, x, kernel, gradient)
        if how.groups > 1 and not _is_depthwise(x, kernel, how):  # not in this package's networks
            return derived(_lax, x, kernel, gradient)
        kernel_gradient = _kernel_gradient if how.groups == 1 else _depthwise_gradient
        slopes = (
            _input_gradient(x, kernel, gradient, how),
            kernel_gradient(x, kernel, gradient, how),
        )
        # Express both as JAX gradients of a linear function: under shard_map's check_vma JAX then
        # sums the gradient of a replicated factor over devices, as usual.
        return jax.grad(lambda *both: sum(map(jnp.vdot, both, slopes)), (0, 1))(x, kernel)

    return lax.platform_dependent(
        *inputs, gradient, cpu=on_cpu, default=functools.partial(derived, _lax)
    )


_convolve.defvjp(_forward, _backward)


def _lax(x: jax.Array, kernel: jax.Array, how: _How) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, how.strides, how.pads, dimension_numbers=_NHWC, feature_group_count=how.groups
    )


def _has_sums(x: jax.Array, kernel: jax.Array, how: _How) -> bool:
    """Returns whether a CPU computes this convolution as a sum over the kernel's taps."""
    if how.groups > 1:
        return _is_depthwise(x, kernel, how)
    outputs = [
        (size + sum(ends) - reach) // stride + 1
        for size, ends, reach, stride in zip(x.shape[1:3], how.pads, kernel.shape, how.strides)
    ]
    return kernel.shape[:2] == (1, 1) or math.prod(outputs) <= _FEW_PIXELS


def _is_depthwise(x: jax.Array, kernel: jax.Array, how: _How) -> bool:
    return how.groups == x.shape[3] == kernel.shape[3]


def _sums(x: jax.Array, kernel: jax.Array, how: _How) -> jax.Array:
    """Computes a convolution as a sum of weighted pixels over the kernel's taps."""
    padded = jnp.pad(x, ((0, 0), *how.pads, (0, 0)))
    (height, width), (down, right) = kernel.shape[:2], how.strides
    dtype = np.promote_types(x.dtype, jnp.float32)
    total: int | jax.Array = 0
    for row, column in itertools.product(range(height), range(width)):
        pixels = padded[
            :,
            row : padded.shape[1] - height + row + 1 : down,
            column : padded.shape[2] - width + column + 1 : right,
        ]
        tap = kernel[row, column]
        if how.groups == 1:
            # Use two axes: with more, XLA transposes the factors of the gradient's product.
            rows = pixels.reshape(-1, pixels.shape[3])
            product = jnp.matmul(rows, tap, preferred_element_type=dtype)
            total += product.reshape(*pixels.shape[:3], -1)
        else:
            total += pixels.astype(dtype) * tap.astype(dtype)
    return jnp.asarray(total, x.dtype)


def _is_widened(x: jax.Array, kernel: jax.Array, how: _How) -> bool:
    """Returns whether a CPU computes this convolution on wide pixels."""
    return (
        how.groups == 1
        and how.strides == (1, 1)
        and kernel.shape[1] > 1
        and x.shape[3] <= _FEW_CHANNELS
        and kernel.shape[3] <= _FEW_OUTPUTS
        and x.dtype.itemsize >= 4  # gradients of the kernel's copies are added in this dtype
    )


def _widened(x: jax.Array, kernel: jax.Array, how: _How) -> jax.Array:
    """Computes a convolution with `_WIDE` pixels of a row as the channels of one wide pixel."""
    (height, width, channels, outputs), (rows, (left, right)) = kernel.shape, how.pads
    columns = x.shape[2] + left + right - width + 1
    wide_columns, reach = -(-columns // _WIDE), -(-(width - 1) // _WIDE) + 1
    size = (wide_columns + reach - 1) * _WIDE
    ends = (left, size - left - x.shape[2], 0)  # may be negative: no output reads the last pixels
    wide = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (*rows, 0), ends, (0, 0, 0)))
    wide = wide.reshape(*wide.shape[:2], -1, _WIDE * channels)
    # Each output of a wide pixel has a copy of the kernel, shifted right by one pixel per output.
    copies = [
        jnp.pad(kernel, ((0, 0), (shift, reach * _WIDE - width - shift), (0, 0), (0, 0)))
        for shift in range(_WIDE)
    ]
    wide_kernel = jnp.stack(copies, 3).reshape(height, reach, _WIDE * channels, _WIDE * outputs)
    y = _convolve(wide, wide_kernel, how._replace(pads=((0, 0), (0, 0))))
    return y.reshape(*y.shape[:2], -1, outputs)[:, :, :columns]


class _Phase(NamedTuple):
    """Taps of a kernel along one axis that read the same set of pixels, which are one stride apart."""

    taps: slice  # of the kernel
    num_taps: int
    pixels: slice  # of the input: the pixels that the taps read
    padding: tuple[int, int]  # pixels of padding that the taps read before and after the input


def _phases(
    x: jax.Array, kernel: jax.Array, gradient: jax.Array, how: _How
) -> Iterator[tuple[_Phase, _Phase]]:
    """Yields every pair of a phase of rows and a phase of columns."""

    def along(
        size: int, reach: int, outputs: int, stride: int, ends: tuple[int, int]
    ) -> Iterator[_Phase]:
        for first in range(min(stride, reach)):
            count = len(range(first, reach, stride))
            pixels = _pixels(first - ends[0], stride, count + outputs - 1, size)
            yield _Phase(slice(first, None, stride), count, *pixels)

    axes = zip(x.shape[1:3], kernel.shape, gradient.shape[1:3], how.strides, how.pads)
    rows, columns = (along(*axis) for axis in axes)
    return itertools.product(rows, columns)


def _input_gradient(x: jax.Array, kernel: jax.Array, gradient: jax.Array, how: _How) -> jax.Array:
    """Computes the input's gradient, for a single group or a depthwise kernel.

    For each phase, the gradient of the pixels is a convolution of the outputs' gradient with the
    reversed taps. The pixels are one stride apart.
    """
    zero = jnp.zeros((), x.dtype)
    total: int | jax.Array = 0
    for phases in _phases(x, kernel, gradient, how):
        rows, columns = (phase.taps for phase in phases)
        taps = kernel[rows, columns][::-1, ::-1]
        around = [
            (phase.num_taps - 1 - before, phase.num_taps - 1 - after)
            for phase in phases
            for before, after in [phase.padding]
        ]
        if how.groups == 1:
            transposed = taps.transpose(0, 1, 3, 2)
            pixels = _lax(gradient, transposed, _How((1, 1), tuple(around), 1))
        else:
            ends = [(before, after, 0) for before, after in around]
            cut = lax.pad(gradient, zero, ((0, 0, 0), *ends, (0, 0, 0)))  # ends may be negative
            pixels = _sums(cut, taps, _How((1, 1), ((0, 0), (0, 0)), how.groups))
        spread = [
            (phase.pixels.start, size - phase.pixels.stop, stride - 1)
            for phase, size, stride in zip(phases, x.shape[1:3], how.strides)
        ]
        total += lax.pad(pixels, zero, ((0, 0, 0), *spread, (0, 0, 0)))
    return jnp.asarray(total)


def _depthwise_gradient(
    x: jax.Array, kernel: jax.Array, gradient: jax.Array, how: _How
) -> jax.Array:
    """Computes a depthwise kernel's gradient in a loop over rows of outputs.

    For each tap, the loop adds products over the rows; sums over images and columns follow at the
    end. Rows and sums stay in a CPU core's cache, and XLA's CPU backend only vectorises sums that
    preserve the channels and another axis.
    """
    dtype = np.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(x, ((0, 0), *how.pads, (0, 0)))
    (height, width), (down, right) = kernel.shape[:2], how.strides

    def products(output: int | jax.Array) -> list[jax.Array]:
        weights = lax.dynamic_index_in_dim(gradient, output, 1, keepdims=False).astype(dtype)
        rows = lax.dynamic_slice_in_dim(padded, output * down, height, 1).astype(dtype)
        return [
            rows[:, row, column : padded.shape[2] - width + column + 1 : right] * weights
            for row, column in itertools.product(range(height), range(width))
        ]

    sums = lax.fori_loop(
        1,
        gradient.shape[1],
        lambda output, sums: jax.tree.map(jnp.add, sums, products(output)),
        products(0),
    )
    taps = jnp.stack([jnp.sum(total, (0, 1)) for total in sums])
    return taps.reshape(kernel.shape).astype(kernel.dtype)


def _kernel_gradient(x: jax.Array, kernel: jax.Array, gradient: jax.Array, how: _How) -> jax.Array:
    """Computes the kernel's gradient in a loop over a few images at a time.

    The gradient is the matrix product of the images' patches, one per output pixel, with the
    gradients of the outputs.
    """
    dtype = np.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(x, ((0, 0), *how.pads, (0, 0)))
    (height, width, channels, outputs), (down, right) = kernel.shape, how.strides
    batch, rows, columns = gradient.shape[:3]
    patch = height * width * channels
    # If the compiler splits the rows of the batch, each device loops over its own rows.
    mesh = jax.sharding.get_abstract_mesh()
    shards = math.prod(mesh.shape[axis] for axis in axes.of_rows())
    shards = 1 if batch % shards else shards
    shard_size = batch // shards
    most = max(1, _PATCH_BYTES // (rows * columns * patch * dtype.itemsize))
    count = max(size for size in range(1, min(most, shard_size) + 1) if shard_size % size == 0)

    def some(all_rows: jax.Array, iteration: int | jax.Array) -> jax.Array:
        split = all_rows.reshape(shards, shard_size, *all_rows.shape[1:])
        return lax.dynamic_slice_in_dim(split, iteration * count, count, 1).astype(dtype)

    def product(iteration: int | jax.Array) -> jax.Array:
        images = some(padded, iteration)
        pixels = [
            images[
                :,
                :,
                row : row + (rows - 1) * down + 1 : down,
                column : column + (columns - 1) * right + 1 : right,
            ]
            for row, column in itertools.product(range(height), range(width))
        ]
        patches = jnp.concatenate(pixels, -1).reshape(shards, -1, patch)
        weights = some(gradient, iteration).reshape(shards, -1, outputs)
        return jnp.einsum("dij,dik->djk", patches, weights)

    total = lax.fori_loop(1, shard_size // count, lambda i, sum_: sum_ + product(i), product(0))
    return jnp.sum(total, 0).reshape(kernel.shape).astype(kernel.dtype)


def _pixels(first: int, stride: int, count: int, size: int) -> tuple[slice, tuple[int, int]]:
    """Splits `count` pixels from `first` on into a slice of the input, and padding pixels (before, after).

    >>> _pixels(-3, 2, 6, 7)
    (slice(1, 6, 2), (2, 1))
    """
    before = max(0, -(first // stride))
    start = first + before * stride
    inside = min(count - before, len(range(start, size, stride)))
    after = count - before - inside
    return slice(start, start + (inside - 1) * stride + 1, stride), (before, after)
