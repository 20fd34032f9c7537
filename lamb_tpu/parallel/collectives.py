"""Sums, scatters and gathers of entire trees inside shard_map, in few operations.

A gradient has hundreds of leaves. One collective for each leaf would pay the latency hundreds of
times, and the TPU compiler turns the reduce-scatter of a small array into an all-reduce of the full
array. So leaves are packed into buckets. Entry i of a bucket's first axis holds device i's shard of
every leaf in the bucket, and one operation scatters or gathers these large, contiguous entries.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.types import PyTree

# Buckets are large enough that latency does not matter, and small enough that the first bucket is
# sent while the backward pass still computes the gradients of the last bucket.
BUCKET_BYTES = 64 * 2**20
# The TPU compiler keeps the reduce-scatter of an array (shards, rows, lanes) if each shard is an
# even number of tiles of 8 rows by 128 lanes. For other shapes, and for flat arrays, the compiler
# uses an all-reduce and a slice.
_LANES = 256
_TILES = 8 * _LANES
# A shard with fewer values than this is not worth padding to tiles.
_FEW = 4 * _TILES
# Largest number of devices among which the TPU compiler keeps a small all-gather.
_ONE_PHASE = 16
# Among more than `_FEW_DEVICES` devices, `gather_rows` pads rows to a multiple of `_ALIGNED` values.
_FEW_DEVICES, _ALIGNED = 8, 128


def all_reduce(tree: PyTree, axes: Sequence[str], dtype: Any = None) -> Any:
    """Sums every leaf over mesh axes, inside shard_map or pmap; the compiler combines the operations.

    Floating-point leaves are sent and added in `dtype`; if it is None, in the dtype of each leaf. The
    sums have the wider of `dtype` and the leaf's dtype.
    """
    sums = lax.psum(jax.tree.map(lambda x: _sent(x, dtype), tree), tuple(axes))
    return jax.tree.map(_wider, sums, tree)


def reduce_scatter(
    leaves: Sequence[jax.Array], axes: Sequence[int], name: str, dtype: Any = None
) -> list[jax.Array]:
    """Sums each array over a mesh axis and returns this device's shards of the sums.

    Large arrays take two phases: a reduce-scatter within groups of neighbouring devices, and another
    among the devices with the same index in each group. With n devices the two phases together send
    (n - 1) / n of the arrays, as one phase would. The TPU compiler keeps both phases, but turns a single
    reduce-scatter over an entire slice into an all-reduce.

    Args:
      leaves: arrays with the same shapes on each device.
      axes: for each array, the axis along which it is split; n divides the axis's length.
      name: the mesh axis, of size n.
      dtype: see `all_reduce`.

    Returns:
      Arrays that are 1/n as long along the split axis, in the dtypes of `all_reduce`.
    """
    parts = lax.axis_size(name)

    def run(bucket: list[jax.Array], cuts: list[int]) -> list[jax.Array]:
        # Matrices of (shards, values of a shard); row i is sent to device i.
        rows = [
            _rows(_sent(leaf, dtype), axis, parts) for leaf, axis in zip(bucket, cuts, strict=True)
        ]
        local = _scatter(_pack(rows), name, parts)
        segments = _unpack(local, [matrix.shape[1] for matrix in rows])
        return [
            _wider(segment.reshape(part_shape(leaf.shape, axis, parts)), leaf)
            for segment, leaf, axis in zip(segments, bucket, cuts, strict=True)
        ]

    return in_buckets(run, leaves, axes)


def _scatter(packed: jax.Array, name: str, parts: int) -> jax.Array:
    """Sums arrays (shards, rows, lanes) over devices; returns this device's entry, (1, rows, lanes)."""
    _, rows, lanes = packed.shape
    near = _near(parts)
    # Arrays with too few values for tiles take a single phase.
    if near == 1 or lanes != _LANES:
        return lax.psum_scatter(packed, name, scatter_dimension=0, tiled=True)
    far = parts // near
    runs, places = _runs(near, far)
    # The first phase is within a group (`run`) of neighbours: device (run, index) gets the sums for
    # the devices with this index in all groups. In the second phase, across groups, it gets its entry.
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
    """Returns the largest divisor of `size` that is at most the square root of `size`."""
    return max(k for k in range(1, math.isqrt(size) + 1) if size % k == 0)


def _runs(near: int, far: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns groups of `near` neighbours, and for each index in a group, the devices with this index."""
    runs = [[run * near + place for place in range(near)] for run in range(far)]
    return runs, [list(places) for places in zip(*runs)]


def all_gather(leaves: Sequence[jax.Array], axes: Sequence[int], name: str) -> list[jax.Array]:
    """Gathers full arrays from the devices' shards.

    Array i is split along its axis `axes[i]` over the mesh axis `name`. With n devices, the full array
    is n times as long along this axis.
    """
    parts = lax.axis_size(name)

    def run(bucket: list[jax.Array], cuts: list[int]) -> list[jax.Array]:
        # Each device has one row, (1, values), with its shard of every leaf.
        packed = _pack([leaf.reshape(1, -1) for leaf in bucket])
        packed = lax.all_gather(packed, name, axis=0, tiled=True)
        columns = _unpack(packed, [leaf.size for leaf in bucket])
        return [
            _from_rows(rows, leaf.shape, axis, parts)
            for rows, leaf, axis in zip(columns, bucket, cuts, strict=True)
        ]

    # The gathered bucket is `parts` times as large as what a device sends.
    return in_buckets(run, leaves, axes, copies=parts)


def lane_shape(length: int) -> tuple[int, ...]:
    """Returns the shape (length // 128, 128), or (length,) if 128 does not divide the length.

    A TPU has 128 lanes. If a vector is cut into long rows, a TPU copies the vector unless each row has
    this shape.
    """
    return (length // _ALIGNED, _ALIGNED) if length % _ALIGNED == 0 else (length,)


def gather_rows(row: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Gathers each device's row, (length,), in the order of the devices: (devices, length).

    Devices that differ only along the last of the axes are consecutive.

    The all-gather over an axis of more than 16 devices takes two phases, like `reduce_scatter` and
    for the same reason; together the phases send as much as one phase. With more than 8 devices,
    rows are padded to a multiple of 128: otherwise the TPU compiler would turn the gather into an
    all-reduce, which sends twice as much.
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
    """Cuts this device's shard out of a replicated array."""
    size = leaf.shape[axis] // lax.axis_size(name)
    return lax.dynamic_slice_in_dim(leaf, lax.axis_index(name) * size, size, axis)


def split(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Cuts the last axis into segments of the given sizes; drops the rest.

    >>> [segment.tolist() for segment in split(jnp.arange(6), [2, 3])]
    [[0, 1], [2, 3, 4]]

    The caller may reshape a segment into a narrow matrix, such as (1024, 2). Without the barrier
    here, the TPU compiler would reshape the joined vector instead and pad its narrow axis to 128,
    which takes 88 GB for BERT-Large's gradient.
    """
    segments = jnp.split(joined, list(itertools.accumulate(sizes)), -1)[:-1]
    return list(lax.optimization_barrier(segments))


def replaced(values: Sequence[Any], numbers: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Returns a copy of `values` in which the items at the indices `numbers` are replaced by `new`."""
    found = list(values)
    for number, value in zip(numbers, new, strict=True):
        found[number] = value
    return found


def in_buckets(
    run: Callable[..., list[jax.Array]],
    leaves: Sequence[jax.Array],
    *others: Sequence[Any],
    copies: int = 1,
) -> list[jax.Array]:
    """Calls `run` on buckets of leaves of the same dtype; returns results in the leaves' order.

    Each of `others` has a value for each leaf; `run` also gets the values for the bucket's leaves. The
    size of a bucket, at most `BUCKET_BYTES`, is `copies` times the size of its leaves.
    """
    buckets: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for index, leaf in enumerate(leaves):
        # A leaf that is larger than a bucket gets a separate bucket. Leaves of different dtypes
        # cannot be packed into one array.
        size = copies * leaf.size * leaf.dtype.itemsize
        own = buckets.setdefault(leaf.dtype, [])
        if not own or filled[leaf.dtype] + size > BUCKET_BYTES:
            own.append([])
            filled[leaf.dtype] = 0
        own[-1].append(index)
        filled[leaf.dtype] += size
    results = list(leaves)
    for indices in itertools.chain.from_iterable(buckets.values()):
        found = run(*([each[i] for i in indices] for each in (leaves, *others)))
        results = replaced(results, indices, found)
    return results


def _sent(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


def _wider(received: jax.Array, own: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # this promotion is intended
        return received.astype(jnp.promote_types(received.dtype, own.dtype))


def _pack(rows: Sequence[jax.Array]) -> jax.Array:
    """Packs matrices (shards, values), one after the other, into a padded array (shards, rows, lanes).

    Each large matrix begins at a tile boundary, so that unpacking moves complete tiles.
    """
    many, few = _large_and_small([matrix.shape[1] for matrix in rows])
    blocks = [rows[i] for i in many]
    # Small leaves form the last block together, which is padded once.
    if few:
        blocks.append(jnp.concatenate([rows[i] for i in few], 1))
    if sum(matrix.shape[1] for matrix in rows) < _FEW:
        # Here all leaves are small, so there is one block, without padding: (shards, 1, values).
        return blocks[0][:, None]
    return jnp.concatenate([_tiled(block) for block in blocks], 1)


def _unpack(packed: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """Returns the matrices (shards, length) that `_pack` packed."""
    many, few = _large_and_small(lengths)
    found: dict[int, jax.Array] = {}
    start = 0
    if sum(lengths) < _FEW:
        rest = packed[:, 0]
    else:
        for index in many:
            # The length of a block is rounded up to full tiles.
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


def part_shape(shape: tuple[int, ...], axis: int, parts: int) -> tuple[int, ...]:
    """Returns the shape of a shard of an array that is split evenly into `parts` along an axis."""
    return (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])


def _rows(leaf: jax.Array, axis: int, parts: int) -> jax.Array:
    """Cuts an array along `axis` into rows: (shards, values of a shard)."""
    # From (before, shards, size / shards * after) to (shards, before * size / shards * after).
    before = math.prod(leaf.shape[:axis])
    return jnp.moveaxis(leaf.reshape(before, parts, -1), 1, 0).reshape(parts, -1)


def _from_rows(rows: jax.Array, part: tuple[int, ...], axis: int, parts: int) -> jax.Array:
    """Returns the array whose i-th shard, of shape `part`, is row i."""
    before = math.prod(part[:axis])
    whole = jnp.moveaxis(rows.reshape(parts, before, -1), 0, 1)
    return whole.reshape(*part[:axis], parts * part[axis], *part[axis + 1 :])
