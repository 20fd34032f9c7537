"""Sums, scatters and gathers of whole trees inside shard_map, in few operations.

A gradient has hundreds of leaves. One collective for each leaf would pay the latency hundreds of
times, and the TPU compiler turns the scatter of a small array into an all-reduce of the whole. So
leaves are packed into buckets. Entry i of a bucket's first axis holds device i's part of every
leaf, and one operation scatters or gathers these large, contiguous entries.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Large enough that latency does not count, small enough that the first bucket is sent while the
# backward pass still computes the last.
BUCKET_BYTES = 64 * 2**20
# The TPU compiler keeps a reduce-scatter of an array (parts, rows, lanes) whose parts are an even
# number of tiles of 8 rows by 128 lanes. It turns other shapes, and flat arrays, into an all-reduce
# and a slice.
_LANES = 256
_TILES = 8 * _LANES
# A device's part of fewer values is not worth padding to tiles.
_FEW = 4 * _TILES
# Among so few devices the TPU compiler keeps a small all-gather.
_ONE_PHASE = 16
# Rows that it gathers among more than this many are to be of so many values.
_FEW_DEVICES, _ALIGNED = 8, 128


def all_reduce(tree: Any, axes: Sequence[str], dtype: Any = None) -> Any:
    """Sums every leaf over mesh axes; the compiler combines the operations.

    Args:
      tree: arrays, the same shapes on each device.
      axes: mesh axes of the surrounding shard_map or pmap.
      dtype: the dtype in which floating-point leaves are sent and added; None: their own.

    Returns:
      The sums, in the wider of `dtype` and each leaf's own.
    """
    sums = lax.psum(jax.tree.map(lambda x: _sent(x, dtype), tree), tuple(axes))
    return jax.tree.map(_wider, sums, tree)


def reduce_scatter(
    leaves: Sequence[jax.Array], axes: Sequence[int], name: str, dtype: Any = None
) -> list[jax.Array]:
    """Sums each array over a mesh axis and returns this device's part.

    This takes two phases: over runs of neighbours, then over the devices at the same place of each
    run. Together they send (n - 1) / n of the arrays, as one phase would. The TPU compiler keeps
    both phases, whereas it replaces one scatter over a whole slice by an all-reduce.

    Args:
      leaves: arrays, the same shapes on each device.
      axes: the axis along which each array is split; the mesh axis' size divides its length.
      name: the mesh axis.
      dtype: the dtype in which arrays are sent and added; None: their own.

    Returns:
      Arrays 1/n as long along their axis, n being the size of the mesh axis; in the wider of
      `dtype` and their own.
    """
    parts = lax.axis_size(name)

    def run(bucket: list[jax.Array], cuts: list[int]) -> list[jax.Array]:
        # Matrices (parts, values of a part): row i of each is to end on device i.
        rows = [
            _rows(_sent(leaf, dtype), axis, parts) for leaf, axis in zip(bucket, cuts, strict=True)
        ]
        local = _scatter(_pack(rows), name, parts)
        pieces = _unpack(local, [matrix.shape[1] for matrix in rows])
        return [
            _wider(piece.reshape(_part_shape(leaf.shape, axis, parts)), leaf)
            for piece, leaf, axis in zip(pieces, bucket, cuts, strict=True)
        ]

    return _in_buckets(run, leaves, axes, 1)


def _scatter(packed: jax.Array, name: str, parts: int) -> jax.Array:
    """Sums (parts, rows, lanes) over devices; returns this device's entry, (1, rows, lanes)."""
    _, rows, lanes = packed.shape
    near = _near(parts)
    # Values too few for tiles are not cut into runs either.
    if near == 1 or lanes != _LANES:
        return lax.psum_scatter(packed, name, scatter_dimension=0, tiled=True)
    far = parts // near
    runs, places = _runs(near, far)
    # Device (run, place) is left with the entries of its place in every run, then with its own.
    packed = packed.reshape(far, near, rows, lanes).swapaxes(0, 1)
    packed = packed.reshape(near, far * rows, lanes)
    packed = lax.psum_scatter(packed, name, scatter_dimension=0, tiled=True, axis_index_groups=runs)
    return lax.psum_scatter(
        packed.reshape(far, rows, lanes),
        name,
        scatter_dimension=0,
        tiled=True,
        axis_index_groups=places,
    )


def _near(size: int) -> int:
    """Length of runs as near to the square root as the size allows; 1 for a prime number."""
    return max(k for k in range(1, math.isqrt(size) + 1) if size % k == 0)


def _runs(near: int, far: int) -> tuple[list[list[int]], list[list[int]]]:
    """Devices in runs of `near` neighbours, and those at the same place of each run."""
    runs = [[run * near + place for place in range(near)] for run in range(far)]
    return runs, [list(places) for places in zip(*runs)]


def all_gather(leaves: Sequence[jax.Array], axes: Sequence[int], name: str) -> list[jax.Array]:
    """Gathers whole arrays from the devices' parts.

    Args:
      leaves: this device's parts, the same shapes on each device.
      axes: the axis along which each array is split.
      name: the mesh axis over which the arrays are split.

    Returns:
      Arrays n times as long along their axis, n being the size of the mesh axis.
    """
    parts = lax.axis_size(name)

    def run(bucket: list[jax.Array], cuts: list[int]) -> list[jax.Array]:
        # A device's part of every leaf is one row, (1, values); gathered, there is one for each
        # device.
        packed = _pack([leaf.reshape(1, -1) for leaf in bucket])
        packed = lax.all_gather(packed, name, axis=0, tiled=True)
        columns = _unpack(packed, [leaf.size for leaf in bucket])
        return [
            _from_rows(rows, leaf.shape, axis, parts)
            for rows, leaf, axis in zip(columns, bucket, cuts, strict=True)
        ]

    # What is gathered is `parts` times what a device gives, and a bucket is measured by it.
    return _in_buckets(run, leaves, axes, parts)


def lane_shape(length: int) -> tuple[int, ...]:
    """Returns the shape (length // 128, 128), or (length,) where 128 does not divide the length.

    A TPU has 128 lanes. It copies a vector that is cut into long rows, unless each row has this
    shape.
    """
    return (length // _ALIGNED, _ALIGNED) if length % _ALIGNED == 0 else (length,)


def gather_rows(row: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Gathers each device's row, in the order of the devices.

    Over many devices it takes two phases, as `reduce_scatter` does and for the same reason; they
    send as much as one. Of more than a few devices rows are padded to a multiple of 128: the TPU
    compiler turns other gathers into all-reduces, which send twice as much.

    Args:
      row: (length,), on each device.
      axes: mesh axes; the devices along the last one follow each other.

    Returns:
      (devices, length).
    """
    length = row.size
    if math.prod(lax.axis_size(name) for name in axes) > _FEW_DEVICES:
        row = jnp.pad(row, (0, -length % _ALIGNED))
    shape = lane_shape(row.size)
    rows = row.reshape(1, *shape)
    for name in reversed(axes):
        size = lax.axis_size(name)
        near = _near(size)
        if size <= _ONE_PHASE or near == 1:
            rows = lax.all_gather(rows, name)
        else:
            runs, places = _runs(near, size // near)
            rows = lax.all_gather(rows, name, axis_index_groups=runs)
            rows = lax.all_gather(rows, name, axis_index_groups=places)
        rows = rows.reshape(-1, *shape)
    return rows.reshape(-1, row.size)[:, :length]


def local_part(leaf: jax.Array, axis: int, name: str) -> jax.Array:
    """Cuts this device's part out of an array that each device holds whole."""
    size = leaf.shape[axis] // lax.axis_size(name)
    return lax.dynamic_slice_in_dim(leaf, lax.axis_index(name) * size, size, axis)


def _in_buckets(
    run: Callable[[list[jax.Array], list[int]], list[jax.Array]],
    leaves: Sequence[jax.Array],
    axes: Sequence[int],
    copies: int,
) -> list[jax.Array]:
    """Calls `run` on buckets of leaves of one dtype; returns the results in the leaves' order.

    A bucket holds `copies` times the size of its leaves.
    """
    buckets: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for index, leaf in enumerate(leaves):
        # A leaf larger than a bucket gets one of its own. Leaves of several dtypes cannot be packed
        # into one array.
        size = copies * leaf.size * leaf.dtype.itemsize
        own = buckets.setdefault(leaf.dtype, [])
        if not own or filled[leaf.dtype] + size > BUCKET_BYTES:
            own.append([])
            filled[leaf.dtype] = 0
        own[-1].append(index)
        filled[leaf.dtype] += size
    results: dict[int, jax.Array] = {}
    for own in buckets.values():
        for indices in own:
            found = run([leaves[i] for i in indices], [axes[i] for i in indices])
            results.update(zip(indices, found, strict=True))
    return [results[index] for index in range(len(leaves))]


def _sent(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


def _wider(received: jax.Array, own: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # this promotion is meant
        return received.astype(jnp.promote_types(received.dtype, own.dtype))


def _pack(rows: Sequence[jax.Array]) -> jax.Array:
    """Packs matrices (parts, values), one after the other, into padded (parts, rows, lanes).

    Each large matrix begins at a tile, so that unpacking moves whole tiles.
    """
    many, few = _large_and_small([matrix.shape[1] for matrix in rows])
    blocks = [rows[i] for i in many]
    # Small leaves share their padding: together they are the last block.
    if few:
        blocks.append(jnp.concatenate([rows[i] for i in few], 1))
    if sum(matrix.shape[1] for matrix in rows) < _FEW:
        # All of them are small here, so there is one block: (parts, 1, values), without padding.
        return blocks[0][:, None]
    return jnp.concatenate([_tiled(block) for block in blocks], 1)


def _unpack(packed: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """Returns the matrices (parts, length) that `_pack` packed."""
    many, few = _large_and_small(lengths)
    found: dict[int, jax.Array] = {}
    start = 0
    if sum(lengths) < _FEW:
        rest = packed[:, 0]
    else:
        for index in many:
            # Rows of the block, whose length is rounded up to whole tiles.
            stop = start + -(-lengths[index] // _TILES) * _TILES // _LANES
            block = packed[:, start:stop].reshape(len(packed), -1)
            found[index], start = block[:, : lengths[index]], stop
        rest = packed[:, start:].reshape(len(packed), -1)
    at = 0
    for index in few:
        found[index] = rest[:, at : at + lengths[index]]
        at += lengths[index]
    return [found[index] for index in range(len(lengths))]


def _large_and_small(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    large = [index for index, length in enumerate(lengths) if length >= _FEW]
    return large, [index for index in range(len(lengths)) if index not in large]


def _tiled(matrix: jax.Array) -> jax.Array:
    parts, length = matrix.shape
    return jnp.pad(matrix, ((0, 0), (0, -length % _TILES))).reshape(parts, -1, _LANES)


def _part_shape(shape: tuple[int, ...], axis: int, parts: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])


def _rows(leaf: jax.Array, axis: int, parts: int) -> jax.Array:
    """Cuts an array along `axis` into rows: (parts, values of a part)."""
    # (before, parts, size / parts x behind) to (parts, before x size / parts x behind).
    before = math.prod(leaf.shape[:axis])
    return jnp.moveaxis(leaf.reshape(before, parts, -1), 1, 0).reshape(parts, -1)


def _from_rows(rows: jax.Array, part: tuple[int, ...], axis: int, parts: int) -> jax.Array:
    """The array whose i-th part, of shape `part`, is row i."""
    before = math.prod(part[:axis])
    whole = jnp.moveaxis(rows.reshape(parts, before, -1), 0, 1)
    return whole.reshape(*part[:axis], parts * part[axis], *part[axis + 1 :])
