"""A lower bound on the memory that a run needs, checked before anything is allocated."""

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lamb_tpu.data import FieldSpec
from lamb_tpu.errors import UserError

_GIB = 2**30
_INDEX_BYTES = 8  # per row, for its index in the data set
# Memory limits of a container: Linux control groups, versions 2 and 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(state: Any, mesh: Mesh, rows: int, spec: Mapping[str, FieldSpec]) -> None:
    """Rejects a run if its state alone, or one batch alone, exceeds the memory.

    Skips devices for which `plan` only compiles: there, the compiler reports the memory needed.

    Args:
      state: parameters, optimizer state and averages as shapes, dtypes and shardings.
      mesh: the mesh over all devices.
      rows: number of rows of a batch that this process holds in host memory.
      spec: shape and dtype of each field of an example.
    """
    devices = _local_devices(mesh)
    if not devices:
        return
    of_device, host = sum(map(_part_bytes, jax.tree.leaves(state))), host_bytes()
    limit = _device_bytes(devices[0])
    where, needed = "a device", of_device
    if limit is None:  # devices of a CPU share the machine's memory
        limit, needed = host, of_device * len(devices)
        where = f"the {len(devices)} device(s) of this machine"
    # Activations need memory too, so a run that passes this check may still not fit.
    _compare(
        "config.model",
        f"parameters and optimizer state need {{}} on {where}",
        needed,
        limit,
        "make the model smaller, or split it over more devices by config.mesh, "
        "config.parallel.rules and config.parallel.optimizer_state",
    )
    _compare(
        "config.batch_size",
        f"{rows:,} examples of a batch need {{}} on this machine",
        rows * _row_bytes(spec),
        host,
        "use a smaller batch or more machines",
    )


def check_call(updates: int, rows: int, spec: Mapping[str, FieldSpec]) -> None:
    """Rejects calls of `updates` batches of `rows` rows that exceed the host's memory."""
    _compare(
        "config.loop.updates_per_call",
        f"{updates:,} batches of {rows:,} examples need {{}} on this machine",
        updates * rows * _row_bytes(spec),
        host_bytes(),
        "use a smaller number",
    )


def _row_bytes(spec: Mapping[str, FieldSpec]) -> int:
    return _INDEX_BYTES + sum(
        math.prod(field.shape) * field.dtype.itemsize for field in spec.values()
    )


def fits(size: int, share: float, mesh: Mesh) -> bool:
    """Returns whether `size` bytes per device fit into a fraction of a device's memory."""
    devices = _local_devices(mesh)
    if not devices:
        return False
    limit = _device_bytes(devices[0])
    # Devices of a CPU share the machine's memory.
    return size <= share * (host_bytes() / len(devices) if limit is None else limit)


def _local_devices(mesh: Mesh) -> list[jax.Device]:
    local = set(jax.local_devices())
    return [device for device in mesh.devices.flat if device in local]


def host_bytes() -> int:
    """Returns this machine's memory in bytes, or the limit of the process's container if that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            sizes.append(int(pathlib.Path(path).read_text()))
        except (OSError, ValueError):  # no container, or no limit (the text 'max')
            continue
    # Without a limit, version 1 of control groups reports a number beyond any memory size.
    return min(sizes)


def _compare(key: str, sentence: str, needed: int, available: int, remedy: str) -> None:
    if needed > available:
        problem = f": {sentence.format(_gib(needed))}, which has {_gib(available)}"
        raise UserError(key, problem=problem, remedy=remedy)


def _device_bytes(device: jax.Device) -> int | None:
    """Returns the memory of a device in bytes; None for a CPU, which uses the machine's memory."""
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def _part_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array on each of its devices."""
    # NumPy has no dtype for random keys, and a key takes only a few bytes.
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return 0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def _gib(size: int) -> str:
    """
    >>> _gib(3 * 10**12), _gib(2**28)
    ('2,794.0 GiB', '0.2 GiB')
    """
    return f"{size / _GIB:,.1f} GiB"
