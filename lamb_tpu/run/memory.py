"""Memory by arithmetic: what a run needs at least, against what there is, before any is taken."""

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
_INDEX_BYTES = 8  # of a row, in the order in which a batch is read
# Of a container: version 2 of Linux' control groups, and version 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(state: Any, mesh: Mesh, rows: int, spec: Mapping[str, FieldSpec]) -> None:
    """Refuses a run whose state or batch cannot fit, whatever else it needs besides.

    Devices that are only compiled for, as by `plan`, are not looked at: the compiler tells more.

    Args:
      state: parameters, optimizer state and averages as shapes, dtypes and shardings.
      mesh: over all devices.
      rows: of a batch that this process reads; they lie in the memory of the host.
      spec: shape and dtype of each field of an example.

    Raises:
      UserError: with the numbers.
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
    _compare(
        f"{what} {{}} on {where}", needed, limit,
        "the model smaller, or split it over more devices by config.mesh, config.parallel.rules "
        "and config.parallel.optimizer_state",
    )
    of_row = _INDEX_BYTES + sum(
        math.prod(field.shape) * field.dtype.itemsize for field in spec.values()
    )
    _compare(
        f"config.batch_size: {rows:,} examples of a batch need {{}} on this machine", rows * of_row,
        host, "it smaller, or take more machines",
    )


def host_bytes() -> int:
    """The memory of this machine, or of the container that the process is in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            sizes.append(int(pathlib.Path(path).read_text()))
        except (OSError, ValueError):  # no container, or one without a limit: 'max'
            continue
    return min(sizes)


def _compare(sentence: str, needed: int, there: int, remedy: str) -> None:
    if needed > there:
        raise UserError(
            f"{sentence.format(_gib(needed))}, which has {_gib(there)}; make {remedy}"
        )


def _device_bytes(device: jax.Device) -> int | None:
    """What a device lets a program have; None where that is the machine's own memory."""
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def _part_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each of its devices."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys
        return 0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def _gib(size: int) -> str:
    """
    >>> _gib(3 * 10**12), _gib(2**28)
    ('2,794.0 GiB', '0.2 GiB')
    """
    return f"{size / _GIB:,.1f} GiB"
