"""Groups of examples that share BatchNorm statistics, and their layout over devices."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

from lamb_tpu.errors import ArgumentError, listed


class Groups(NamedTuple):
    """Layout of the groups, as one program sees it."""

    rows: int  # number of examples in a group that this program holds
    axes: tuple[str, ...] = ()  # mesh axes over which the statistics of a group are averaged
    # The devices of each group, if a group spans only some of the devices along `axes`.
    index_groups: list[list[int]] | None = None
    other_axes: tuple[str, ...] = ()  # mesh axes over which means over all groups are also taken


def groups_of(rows: int, group_size: int | None, axis_name: str | Sequence[str] | None) -> Groups:
    """Returns the groups for a program that sees `rows` examples; see `norm.BatchNorm`.

    Raises:
      ValueError: `group_size` does not fit the batch, or `axis_name` is None although the batch is
        split inside shard_map or pmap.
    """
    if axis_name is None:
        # Otherwise "the full batch" would silently mean one device's shard.
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual:
            problem = (
                f"hides the other devices from BatchNorm in shard_map over {', '.join(manual)}"
            )
            remedy = "set the axes that split the batch, or () if no axis does"
            raise ArgumentError("axis_name", None, problem, remedy)
        axis_name = ()
    # Axis sizes are known while shard_map is traced, so all of this is plain Python.
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    sizes = [lax.axis_size(axis) for axis in axes]
    devices = math.prod(sizes)
    _check_group_size(group_size, rows, devices)
    if group_size is None:
        return Groups(rows, axes)
    # Each group is on one device. Only the running averages of the full batch need communication.
    if group_size <= rows:
        return Groups(group_size, other_axes=axes)
    replicas = group_size // rows
    # A group that spans complete inner axes needs no index groups, which shard_map only supports
    # with check_vma=False.
    for inner in range(len(axes)):
        if math.prod(sizes[inner:]) == replicas:
            return Groups(rows, axes[inner:], None, axes[:inner])
    # The mean over all axes counts each group once per device. All groups have the same number of
    # devices, so this does not change the mean.
    index_groups = [list(range(i, i + replicas)) for i in range(0, devices, replicas)]
    return Groups(rows, axes, index_groups, axes)


def describe_groups(group_size: int | None, batch: int, devices: int) -> tuple[int, str]:
    """Returns the number of devices per group, and a line that describes the groups.

    `batch` counts the examples of a microbatch over all devices. Raises a ValueError if `group_size`
    does not fit.

    >>> describe_groups(32, 64, 8)
    (4, 'BatchNorm: groups of 32 examples, 2 in a forward pass, 4 device(s) each')
    >>> describe_groups(4, 64, 8)
    (1, 'BatchNorm: groups of 4 examples, 16 in a forward pass, 2 on each device')
    """
    rows = batch // devices
    _check_group_size(group_size, rows, devices)
    size = batch if group_size is None else group_size
    line = f"BatchNorm: groups of {size} examples, {batch // size} in a forward pass, "
    if size < rows:
        return 1, line + f"{rows // size} on each device"
    return size // rows, line + f"{size // rows} device(s) each"


def _check_group_size(group_size: int | None, rows: int, devices: int) -> None:
    """Rejects a group size that does not fit.

    A group size must divide the batch, and divide the rows per device or be a multiple of them.
    """
    if group_size is None:
        return
    if type(group_size) is not int or group_size < 1:
        remedy = "use None or a whole number of at least 1"
        raise ArgumentError("group_size", group_size, "is out of range", remedy)
    batch = rows * devices
    if batch % group_size or (rows % group_size and group_size % rows):
        fitting = [
            size
            for size in range(1, batch + 1)
            if batch % size == 0 and (rows % size == 0 or size % rows == 0)
        ]
        below = [size for size in fitting if size < group_size]
        above = [size for size in fitting if size > group_size]
        split = f", {rows} on each of {devices} devices" if devices > 1 else ""
        problem = f"does not fit the batch of {batch} examples{split}"
        remedy = f"use {listed([*below[-1:], *above[:1]])}"
        raise ArgumentError("group_size", group_size, problem, remedy)
