"""Compares the devices' copies of the same array by hashes.

Devices that should hold the same parameters can diverge, because a bit flips in the memory of one
device, or because one process runs different code or reads different data. Without this check, each
device would continue with its copy, and nobody would notice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.errors import UserError
from lamb_tpu.optim.parameters import leaf_paths
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.types import PyTree
from lamb_tpu.watch.observer import Observer

_MOST_DEVICES = 8  # most devices that a message names individually


def make_desync_check(abstract: PyTree, mesh: Mesh) -> Callable[[Any, int], None]:
    """Returns a function `(tree, step)` that compares the copies of every array.

    Each device hashes its shard of each array to 32 bits, and only hashes are sent. All processes
    must call the function, and all of them raise a UserError if two copies of a shard differ. A
    difference in one element is always detected; differences in several elements are missed with
    probability 2**-32.

    Args:
      abstract: shapes, dtypes and `NamedSharding`s over `mesh` of the tree to check.
      mesh: the mesh over all devices.
    """
    leaves = jax.tree.leaves(abstract)
    # Indices and specs of the leaves that have several copies of each shard.
    copied = {
        number: leaf.sharding.spec
        for number, leaf in enumerate(leaves)
        if _num_copies(leaf.sharding.spec, mesh) > 1
    }
    if not copied:
        return lambda tree, step: None
    paths = leaf_paths(abstract)

    def hashes(arrays: list[jax.Array]) -> jax.Array:
        # (arrays,) on each device; gathered to (devices, arrays).
        local = jnp.stack([_hash(array) for array in arrays])
        return jax.lax.all_gather(local, mesh.axis_names)

    gathered = jax.jit(
        jax.shard_map(
            hashes,
            mesh=mesh,
            in_specs=(list(copied.values()),),
            out_specs=PartitionSpec(),
            check_vma=False,  # the check assumes that copies are equal
        )
    )

    def check(tree: PyTree, step: int) -> None:
        arrays = jax.tree.leaves(tree)
        table = np.asarray(gathered([arrays[number] for number in copied]))
        different = []
        for (number, spec), column in zip(copied.items(), table.T, strict=True):
            # Both have the shape (shards, copies of the shard).
            values, devices = (_by_shard(a, spec, mesh) for a in (column, mesh.devices.ravel()))
            if (values != values[:, :1]).any():
                different.append((paths[number], values, devices))
        if different:
            path, values, devices = different[0]
            others = f" (and of {len(different) - 1} more)" if len(different) > 1 else ""
            raise UserError(
                f"after update {step} the copies of {path}{others}",
                ...,
                f"differ between devices: {_who(values, devices)}. A device is faulty, or the "
                "processes do not run the same program on the same data",
                "start the same command again; it resumes from the previous checkpoint",
            )

    return check


class Desync(Observer):
    """Compares copies of the train state before each save, and at intervals of `guards.desync_every`."""

    def __init__(self, run: Run, current: CurrentRecipe) -> None:
        self._current = current
        self._compared = -1
        if run.recipe.desync_every:
            self._parts = run.parts
            self._check = make_desync_check(self._copied(run.abstract_state), run.mesh)

    def ends_call(self, step: int) -> bool:
        recipe = self._current.value
        return recipe.is_due(recipe.desync_every, step)

    def updated(self, step: int, state: TrainState) -> None:
        if self.ends_call(step):
            self.saving(step, state)

    def saving(self, step: int, state: TrainState) -> None:
        """Raises a UserError if two copies of an array differ."""
        # An interval and a save can fall on the same update.
        if self._current.value.desync_every and self._compared != step:
            self._check(self._copied(state), step)
            self._compared = step

    def _copied(self, state: TrainState) -> dict[str, Any]:
        further = {part.name: part.copied(state.parts[part.name]) for part in self._parts}
        return {"params": state.params, **state.model_state, **further}


def _hash(array: jax.Array) -> jax.Array:
    """Hashes the bits of an array and their positions to 32 bits.

    The hash is a sum over elements modulo 2**32, so it does not depend on the summation order.
    """
    # JAX does not bitcast booleans.
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    # Elements wider than 32 bits become pairs, along a new last axis.
    width = min(32, 8 * array.dtype.itemsize)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    # The index of each element in the flattened array, in the array's shape.
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, length in enumerate(bits.shape):
        # A reshape to one axis would be simpler, but on a TPU it moves every element.
        index = index * np.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    # Each step is bijective (MurmurHash3's finalizer), so one changed element changes the sum.
    # 0x9E3779B9 is 2**32 divided by the golden ratio; it maps neighbouring indices far apart.
    mixed = bits + index * np.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _axes(spec: PartitionSpec) -> list[str]:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return [axis for entry in entries for axis in entry if axis is not None]


def _num_copies(spec: PartitionSpec, mesh: Mesh) -> int:
    num_shards = np.prod([mesh.shape[axis] for axis in _axes(spec)], dtype=int)
    return mesh.size // int(num_shards)


def _by_shard(column: np.ndarray, spec: PartitionSpec, mesh: Mesh) -> np.ndarray:
    """Reshapes an array of one value per device, (devices,), to (shards, copies of the shard)."""
    sharded = [mesh.axis_names.index(axis) for axis in _axes(spec)]
    # Move the sharded axes to the front: a row is a shard, and its columns are the copies.
    cube = np.moveaxis(column.reshape(mesh.devices.shape), sharded, range(len(sharded)))
    return cube.reshape(-1, _num_copies(spec, mesh))


def _who(values: np.ndarray, devices: np.ndarray) -> str:
    """Describes the devices that differ from the majority; without a majority, describes two groups."""
    minority: list[jax.Device] = []
    undecided: list[str] = []
    for shard, holders in zip(values, devices, strict=True):
        groups = [holders[shard == value] for value in dict.fromkeys(shard)]
        largest = max(groups, key=len)
        if 2 * len(largest) > len(shard):
            minority.extend(device for group in groups if group is not largest for device in group)
        else:
            rest = f" against {len(groups) - 2} further values" if len(groups) > 2 else ""
            undecided.append(f"{_names(groups[0])} against {_names(groups[1])}{rest}")
    decided = [f"{_names(minority)} differ{'s' * (len(minority) == 1)} from the majority"]
    return "; ".join(decided * bool(minority) + undecided[:1])


def _names(devices: Sequence[jax.Device]) -> str:
    """Formats devices as 'devices 4, 5 of process 1', with at most `_MOST_DEVICES` ids."""
    shown = sorted(devices, key=lambda device: device.id)[:_MOST_DEVICES]
    by_process: dict[int, list[str]] = {}
    for device in shown:
        by_process.setdefault(device.process_index, []).append(str(device.id))
    text = ", ".join(
        f"device{'s' * (len(ids) > 1)} {', '.join(ids)} of process {process}"
        for process, ids in sorted(by_process.items())
    )
    rest = len(devices) - len(shown)
    return text + (f" and {rest} more" if rest else "")
