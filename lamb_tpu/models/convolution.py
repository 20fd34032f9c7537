"""The convolution of all networks here, in forms that XLA also computes fast on CPUs.

XLA's CPU backend has fast convolutions for one order of axes, one group and no dilation. JAX' own
gradients have other orders and dilations and take tens of times as long within a loop, such as
that over microbatches. Depthwise convolutions and those with 2x2 outputs are slow everywhere,
forward and backward. So programs for CPUs are written in another way:
- The input's gradient is a convolution of the outputs' gradient, in the fast order. With strides
  the kernel's places fall into kinds, each of which sees every so many pixels, and every kind has a
  convolution without strides of its own.
- The kernel's gradient is a matrix product of patches, a few images at a time.
- If the kernel is depthwise or has one place, or the output has few pixels, the convolution is a
  sum of products over the kernel's places.
- If a picture of up to three channels has few outputs, four pixels of a row are the channels of one
  wide pixel, and the kernel has a copy for each of the four: XLA's vectors lie along the channels.
Programs for other devices are JAX' own. `python -m experiments.bench.convolution` measures this.
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

from lamb_tpu.models import axes

_NHWC = ("NHWC", "HWIO", "NHWC")
_FAST_ORDER = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
_FEW_PIXELS = 9  # outputs up to this size are sums; from 16 pixels on convolutions are as fast
_PICTURE, _FEW_OUTPUTS, _WIDE = 3, 16, 4  # channels, outputs, and pixels that become one
_PATCH_BYTES = 2**22  # of patches that are made at once: they stay in the cache
_Pads = tuple[tuple[int, int], ...]


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
    """`jax.lax.conv_general_dilated` of images; for `conv_general_dilated` of `flax.linen.Conv`.

    Args:
      x: (batch, height, width, channels).
      kernel: (height, width, channels / feature_group_count, outputs), of the same dtype.
      strides: strides of height and width.
      padding: 'SAME', 'VALID', or the pixels before and after, for height and width.
      lhs_dilation, rhs_dilation, dimension_numbers, precision: the defaults of `flax.linen.Conv`;
        other values are refused.
      feature_group_count: number of groups of channels that do not mix.

    Returns:
      (batch, height, width, outputs), differentiable in reverse mode.

    Raises:
      ValueError: a dilation, a precision or another order of axes was given.
    """
    order = lax.conv_dimension_numbers(x.shape, kernel.shape, _NHWC)
    plain = {*lhs_dilation, *rhs_dilation} == {1} and precision is None
    if not plain or dimension_numbers not in (None, order):
        raise ValueError("convolve takes NHWC images, no dilation and no precision")
    pads = padding
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    return _convolve(x, kernel, tuple(strides), tuple(map(tuple, pads)), feature_group_count)


def are_fast_in_loops(program: str) -> bool:
    """Returns whether a CPU computes all convolutions of a program as fast within a loop.

    Args:
      program: StableHLO as text, lowered for a CPU. Those of `convolve` are fast, and gradients of
        `jax.lax` are not.
    """
    lines = [line for line in program.splitlines() if "stablehlo.convolution" in line]
    return all(
        _FAST_ORDER in line
        and "feature_group_count = 1 " in line
        and {*re.findall(r"\d+", " ".join(re.findall(r"_dilate = \[(.*?)\]", line)))} <= {"1"}
        for line in lines
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _convolve(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], pads: _Pads, groups: int
) -> jax.Array:
    how = strides, pads, groups
    on_cpu = _sums if _has_sums(x, kernel, *how) else _lax
    if _is_widened(x, kernel, strides, groups):
        on_cpu = _widened
    return lax.platform_dependent(
        x,
        kernel,
        cpu=lambda x, kernel: on_cpu(x, kernel, *how),
        default=lambda x, kernel: _lax(x, kernel, *how),
    )


def _forward(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], pads: _Pads, groups: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(x, kernel, strides, pads, groups), (x, kernel)


def _backward(
    strides: tuple[int, ...],
    pads: _Pads,
    groups: int,
    inputs: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def derived(
        convolution: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        back = jax.vjp(lambda *both: convolution(*both, strides, pads, groups), x, kernel)[1]
        return back(gradient)

    def on_cpu(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        if _is_widened(x, kernel, strides, groups):
            return derived(_widened, x, kernel, gradient)
        if groups == 1 and _has_sums(x, kernel, strides, pads, groups):
            return derived(_sums, x, kernel, gradient)
        if groups > 1 and not _is_depthwise(x, kernel, groups):  # no network here has them
            return derived(_lax, x, kernel, gradient)
        of_kernel = _kernel_gradient if groups == 1 else _depthwise_gradient
        found = (
            _input_gradient(x, kernel, gradient, strides, pads, groups),
            of_kernel(x, kernel, gradient, strides, pads),
        )
        # Both are written as gradients of a factor, so that under shard_map's check_vma JAX sums
        # those of a replicated factor, as in its own derivatives.
        return jax.grad(lambda *both: sum(map(jnp.vdot, both, found)), (0, 1))(x, kernel)

    return lax.platform_dependent(
        *inputs, gradient, cpu=on_cpu, default=functools.partial(derived, _lax)
    )


_convolve.defvjp(_forward, _backward)


def _lax(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], pads: _Pads, groups: int
) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, strides, pads, dimension_numbers=_NHWC, feature_group_count=groups
    )


def _has_sums(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], pads: _Pads, groups: int
) -> bool:
    """Returns whether a CPU computes this convolution as a sum over the kernel's places."""
    if groups > 1:
        return _is_depthwise(x, kernel, groups)
    outputs = [
        (size + sum(ends) - reach) // stride + 1
        for size, ends, reach, stride in zip(x.shape[1:3], pads, kernel.shape, strides)
    ]
    return kernel.shape[:2] == (1, 1) or math.prod(outputs) <= _FEW_PIXELS


def _is_depthwise(x: jax.Array, kernel: jax.Array, groups: int) -> bool:
    return groups == x.shape[3] == kernel.shape[3]


def _sums(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], pads: _Pads, groups: int
) -> jax.Array:
    """Computes a convolution as a sum over the kernel's places of weighted pixels."""
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    (height, width), (down, right) = kernel.shape[:2], strides
    dtype = np.promote_types(x.dtype, jnp.float32)
    total: int | jax.Array = 0
    for row, column in itertools.product(range(height), range(width)):
        pixels = padded[
            :,
            row : padded.shape[1] - height + row + 1 : down,
            column : padded.shape[2] - width + column + 1 : right,
        ]
        place = kernel[row, column]
        if groups == 1:
            # Of two axes: the gradient's product over more axes is transposed first.
            rows = pixels.reshape(-1, pixels.shape[3])
            product = jnp.matmul(rows, place, preferred_element_type=dtype)
            total += product.reshape(*pixels.shape[:3], -1)
        else:
            total += pixels.astype(dtype) * place.astype(dtype)
    return jnp.asarray(total, x.dtype)


def _is_widened(x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], groups: int) -> bool:
    """Returns whether a CPU computes this convolution on wide pixels."""
    return (
        groups == 1
        and strides == (1, 1)
        and kernel.shape[1] > 1
        and x.shape[3] <= _PICTURE
        and kernel.shape[3] <= _FEW_OUTPUTS
        and x.dtype.itemsize >= 4  # the copies' gradients are added in this dtype
    )


def _widened(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], pads: _Pads, groups: int
) -> jax.Array:
    """Computes a convolution with `_WIDE` pixels of a row as the channels of one."""
    (height, width, channels, outputs), (rows, (left, right)) = kernel.shape, pads
    columns = x.shape[2] + left + right - width + 1
    turns, reach = -(-columns // _WIDE), -(-(width - 1) // _WIDE) + 1
    size = (turns + reach - 1) * _WIDE
    ends = (left, size - left - x.shape[2], 0)  # the end may be cut: no output reads it
    wide = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (*rows, 0), ends, (0, 0, 0)))
    wide = wide.reshape(*wide.shape[:2], -1, _WIDE * channels)
    # The copy for a wide pixel's second output lies one pixel further right, and so on.
    copies = [
        jnp.pad(kernel, ((0, 0), (shift, reach * _WIDE - width - shift), (0, 0), (0, 0)))
        for shift in range(_WIDE)
    ]
    places = jnp.stack(copies, 3).reshape(height, reach, _WIDE * channels, _WIDE * outputs)
    found = _convolve(wide, places, strides, ((0, 0), (0, 0)), groups)
    return found.reshape(*found.shape[:2], -1, outputs)[:, :, :columns]


class _Kind(NamedTuple):
    """Places of a kernel along one axis that meet the same pixels, every so many apart.

    Attributes:
      places: their slice of the kernel.
      reach: their number.
      pixels: the slice of the input that they meet.
      outside: how many pixels of padding they meet before and behind it.
    """

    places: slice
    reach: int
    pixels: slice
    outside: tuple[int, int]


def _kinds(
    x: jax.Array, kernel: jax.Array, gradient: jax.Array, strides: tuple[int, ...], pads: _Pads
) -> Iterator[tuple[_Kind, _Kind]]:
    """Yields the kinds of places, of rows and columns: as many as a stride has pixels."""

    def along(
        size: int, reach: int, outputs: int, stride: int, ends: tuple[int, int]
    ) -> Iterator[_Kind]:
        for first in range(min(stride, reach)):
            count = len(range(first, reach, stride))
            met = _pixels(first - ends[0], stride, count + outputs - 1, size)
            yield _Kind(slice(first, None, stride), count, *met)

    axes = zip(x.shape[1:3], kernel.shape, gradient.shape[1:3], strides, pads)
    rows, columns = (along(*axis) for axis in axes)
    return itertools.product(rows, columns)


def _input_gradient(
    x: jax.Array,
    kernel: jax.Array,
    gradient: jax.Array,
    strides: tuple[int, ...],
    pads: _Pads,
    groups: int,
) -> jax.Array:
    """Computes the input's gradient, for one group or depthwise.

    The pixels that one kind of places meets are a convolution of the outputs' gradient with those
    places in reverse; they lie a stride apart.
    """
    zero = jnp.zeros((), x.dtype)
    total: int | jax.Array = 0
    for kinds in _kinds(x, kernel, gradient, strides, pads):
        rows, columns = (kind.places for kind in kinds)
        places = kernel[rows, columns][::-1, ::-1]
        around = [
            (kind.reach - 1 - before, kind.reach - 1 - behind)
            for kind in kinds
            for before, behind in [kind.outside]
        ]
        if groups == 1:
            turned = places.transpose(0, 1, 3, 2)
            found = _lax(gradient, turned, (1, 1), tuple(around), groups)
        else:
            ends = [(before, behind, 0) for before, behind in around]
            cut = lax.pad(gradient, zero, ((0, 0, 0), *ends, (0, 0, 0)))  # ends may be negative
            found = _sums(cut, places, (1, 1), ((0, 0), (0, 0)), groups)
        apart = [
            (kind.pixels.start, size - kind.pixels.stop, stride - 1)
            for kind, size, stride in zip(kinds, x.shape[1:3], strides)
        ]
        total += lax.pad(found, zero, ((0, 0, 0), *apart, (0, 0, 0)))
    return jnp.asarray(total)


def _depthwise_gradient(
    x: jax.Array, kernel: jax.Array, gradient: jax.Array, strides: tuple[int, ...], pads: _Pads
) -> jax.Array:
    """Computes a depthwise kernel's gradient, one row of all outputs after another.

    A place's products with a row of outputs add to those of the rows before; images and columns
    are summed at the end. Rows and sums stay in a core's cache, and sums that keep the channels
    and another axis are the ones that XLA's CPU backend computes on whole vectors.
    """
    dtype = np.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    (height, width), (down, right) = kernel.shape[:2], strides

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
    places = jnp.stack([jnp.sum(total, (0, 1)) for total in sums])
    return places.reshape(kernel.shape).astype(kernel.dtype)


def _kernel_gradient(
    x: jax.Array, kernel: jax.Array, gradient: jax.Array, strides: tuple[int, ...], pads: _Pads
) -> jax.Array:
    """Computes the kernel's gradient from some images after another.

    It is the product of their patches, one for each output, with the outputs' gradients.
    """
    dtype = np.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    (height, width, channels, outputs), (down, right) = kernel.shape, strides
    batch, rows, columns = gradient.shape[:3]
    patch = height * width * channels
    # Where the compiler splits the rows of the batch, each device goes through its own.
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in axes.of_rows())
    parts = 1 if batch % parts else parts
    own = batch // parts
    most = max(1, _PATCH_BYTES // (rows * columns * patch * dtype.itemsize))
    count = max(size for size in range(1, min(most, own) + 1) if own % size == 0)

    def some(all_rows: jax.Array, turn: int | jax.Array) -> jax.Array:
        split = all_rows.reshape(parts, own, *all_rows.shape[1:])
        return lax.dynamic_slice_in_dim(split, turn * count, count, 1).astype(dtype)

    def product(turn: int | jax.Array) -> jax.Array:
        images = some(padded, turn)
        places = [
            images[
                :,
                :,
                row : row + (rows - 1) * down + 1 : down,
                column : column + (columns - 1) * right + 1 : right,
            ]
            for row, column in itertools.product(range(height), range(width))
        ]
        patches = jnp.concatenate(places, -1).reshape(parts, -1, patch)
        weights = some(gradient, turn).reshape(parts, -1, outputs)
        return jnp.einsum("dij,dik->djk", patches, weights)

    total = lax.fori_loop(1, own // count, lambda turn, sum_: sum_ + product(turn), product(0))
    return jnp.sum(total, 0).reshape(kernel.shape).astype(kernel.dtype)


def _pixels(first: int, stride: int, count: int, size: int) -> tuple[slice, tuple[int, int]]:
    """Returns a slice of `count` pixels from `first` on, and how many lie before and behind.

    >>> _pixels(-3, 2, 6, 7)
    (slice(1, 6, 2), (2, 1))
    """
    before = max(0, -(first // stride))
    start = first + before * stride
    inside = min(count - before, len(range(start, size, stride)))
    behind = count - before - inside
    return slice(start, start + (inside - 1) * stride + 1, stride), (before, behind)
