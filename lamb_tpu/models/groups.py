"""Groups of examples that share BatchNorm's statistics, and their layout over devices."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax


class Groups(NamedTuple):
    """Layout of groups among the examples that a program sees.

    Attributes:
      rows: number of the program's examples in one group.
      axes: mesh axes over which a group's sums run.
      index_groups: groups of devices, if the sums run over parts of those axes.
      other_axes: further mesh axes over which means of groups run.
    """

    rows: int
    axes: tuple[str, ...] = ()
    index_groups: list[list[int]] | None = None
    other_axes: tuple[str, ...] = ()


def groups_of(rows: int, group_size: int | None, axis_name: str | Sequence[str] | None) -> Groups:
    """Returns the groups for a program that sees `rows` examples.

    Args:
      rows: number of examples on a device; under jit, of the whole batch.
      group_size: examples per group; None for the whole batch.
      axis_name: inside shard_map or pmap, the mesh axes that split the batch, outermost first.

    Raises:
      ValueError: `group_size` does not fit, or `axis_name` is missing although the batch is split.
    """
    if axis_name is None:
        # Otherwise "the whole batch" would silently be one device's part.
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual:
            raise ValueError(
                f"inside shard_map or pmap over {', '.join(manual)} BatchNorm sees one device's "
                "examples only: set axis_name to the axes that split the batch, () for none"
            )
        axis_name = ()
    # Sizes of the axes are known while shard_map is traced, so everything here is Python.
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    sizes = [lax.axis_size(axis) for axis in axes]
    devices = math.prod(sizes)
    _check_group_size(group_size, rows, devices)
    if group_size is None:
        return Groups(rows, axes)
    # The groups lie within a device. Only the running averages, of the whole batch, communicate.
    if group_size <= rows:
        return Groups(group_size, other_axes=axes)
    replicas = group_size // rows
    # A group of whole inner axes needs no index groups, which shard_map takes only with
    # check_vma=False.
    for inner in range(len(axes)):
        if math.prod(sizes[inner:]) == replicas:
            return Groups(rows, axes[inner:], None, axes[:inner])
    # The mean over all axes counts each group once for each of its devices, which is the same
    # number for all groups and does not change the mean.
    index_groups = [list(range(i, i + replicas)) for i in range(0, devices, replicas)]
    return Groups(rows, axes, index_groups, axes)


def describe_groups(group_size: int | None, batch: int, devices: int) -> tuple[int, str]:
    """Returns the number of devices that share a group, and a line about the groups.

    Args:
      group_size: examples per group; None for the whole batch.
      batch: number of examples of a microbatch over all devices.
      devices: number of devices over which the batch is split evenly.

    Raises:
      ValueError: `group_size` does not fit.

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
    """Raises ValueError if the group size neither divides a device's rows nor is a multiple."""
    if group_size is None:
        return
    if type(group_size) is not int or group_size < 1:
        raise ValueError(
            f"group_size must be None or a whole number of at least 1, not {group_size!r}"
        )
    batch = rows * devices
    if batch % group_size or (rows % group_size and group_size % rows):
        # The message names the nearest group sizes that would fit.
        fitting = [n for n in _divisors(batch) if rows % n == 0 or n % rows == 0]
        split = f", {rows} on each of {devices} devices" if devices > 1 else ""
        raise ValueError(
            f"group_size is {group_size}, which does not fit the batch of {batch} examples{split}; "
            f"{_nearest(group_size, fitting)} would"
        )


def _divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(number: int, fitting: list[int]) -> str:
    """Names the nearest fitting numbers below and above a number."""
    below = [n for n in fitting if n < number]
    above = [n for n in fitting if n > number]
    return " or ".join(str(n) for n in [max(below, default=0), min(above, default=0)] if n)
