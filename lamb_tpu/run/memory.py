"""Lower bound of a run's memory, checked against the machine before anything is allocated."""

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
_INDEX_BYTES = 8  # for each row, in the order in which a batch is read
# Memory limits of a container: version 2 of Linux' control groups, and version 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(state: Any, mesh: Mesh, rows: int, spec: Mapping[str, FieldSpec]) -> None:
    """Refuses a run whose state or batch alone exceeds the memory.

    Devices of `plan`, which are only compiled for, are not checked: the compiler knows more.

    Args:
      state: parameters, optimizer state and averages as shapes, dtypes and shardings.
      mesh: the mesh over all devices.
      rows: number of rows of a batch that this process holds in the host's memory.
      spec: shape and dtype of each field of an example.

    Raises:
      UserError: state or batch cannot fit; the message has the numbers.
    """
    here = set(jax.local_devices())
    devices = [device for device in mesh.devices.flat if device in here]
    if not devices:
        return
    of_device, host = sum(map(_part_bytes, jax.tree.leaves(state))), host_bytes()
    what = "the model's parameters and optimizer state need"
    limit = _device_bytes(devices[0])
    where, needed = "a device", of_device
    if limit is None:  # devices of a CPU share the machine's memory
        limit, needed = host, of_device * len(devices)
        where = f"the {len(devices)} device(s) of this machine"
    # Activations come on top of this, so what passes here may still not fit.
    _compare(
        f"{what} {{}} on {where}",
        needed,
        limit,
        "the model smaller, or split it over more devices by config.mesh, config.parallel.rules "
        "and config.parallel.optimizer_state",
    )
    of_row = _INDEX_BYTES + sum(
        math.prod(field.shape) * field.dtype.itemsize for field in spec.values()
    )
    _compare(
        f"config.batch_size: {rows:,} examples of a batch need {{}} on this machine",
        rows * of_row,
        host,
        "it smaller, or take more machines",
    )


def host_bytes() -> int:
    """Returns the memory of this machine, or the limit of the process' container."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            sizes.append(int(pathlib.Path(path).read_text()))
        except (OSError, ValueError):  # no container, or no limit: the text 'max'
            continue
    # Without a limit, version 1 gives a number beyond any memory.
    return min(sizes)


def _compare(sentence: str, needed: int, there: int, remedy: str) -> None:
    if needed > there:
        raise UserError(f"{sentence.format(_gib(needed))}, which has {_gib(there)}; make {remedy}")


def _device_bytes(device: jax.Device) -> int | None:
    """Returns the memory of a device; None if it is the machine's own, as of a CPU."""
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def _part_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array on each of its devices."""
    # NumPy has no such dtype, and a key takes a few bytes only.
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys
        return 0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def _gib(size: int) -> str:
    """
    >>> _gib(3 * 10**12), _gib(2**28)
    ('2,794.0 GiB', '0.2 GiB')
    """
    return f"{size / _GIB:,.1f} GiB"
