"""Devices of a TPU in an order in which groups of neighbours come one after the other.

Groups of BatchNorm are runs of consecutive examples, so runs of consecutive devices. Which devices
these are decides how far a group's sums travel.
"""

import itertools
import math
from collections.abc import Sequence

import jax

# The EfficientNet paper takes consecutive replicas up to here and tiles of the torus above.
LARGEST_RING = 16


def order(devices: Sequence[jax.Device], replicas: int) -> list[jax.Device]:
    """The devices of one slice, so that every run of `replicas` of them is close together.

    Up to 16 replicas a group is a piece of a path through the whole torus, from neighbour to
    neighbour and both cores of a chip in a row. Above, as in the EfficientNet paper, it is a tile:
    of the boxes with as many devices that tile the torus, the one whose sides have the least sum,
    which on a flat torus is the rectangle nearest to a square. Within a tile the order is again a
    path.

    Args:
      devices: of one kind; on a TPU with `coords`, the chip's (x, y, z), and `core_on_chip`.
      replicas: devices of a group.

    Returns:
      All devices. As they are given, where they have no coordinates or do not fill a box.

    Raises:
      ValueError: `replicas` is no whole number of at least 1 that divides the devices.

    References:
      Wongpanich et al., Training EfficientNets at Supercomputer Scale, arXiv:2011.00071.
    """
    if type(replicas) is not int or replicas < 1 or len(devices) % replicas:
        raise ValueError(
            f"replicas must be a whole number that divides the {len(devices)} devices, not "
            f"{replicas!r}"
        )
    if not all(hasattr(device, "coords") for device in devices):
        return list(devices)
    # As in the numbers of the devices, x runs fastest, and the cores of a chip before it.
    at = {(*reversed(d.coords), getattr(d, "core_on_chip", 0)): d for d in devices}
    ticks = [sorted(set(axis)) for axis in zip(*at)]
    sides = [len(axis) for axis in ticks]
    if not len(at) == len(devices) == math.prod(sides):
        return list(devices)
    tile = sides if replicas <= LARGEST_RING else _tile(sides, replicas)
    tiles = [side // length for side, length in zip(sides, tile)]
    return [
        at[tuple(axis[c * n + i] for axis, c, n, i in zip(ticks, corner, tile, inside))]
        for corner in _path(tiles)
        for inside in _path(tile)
    ]


def _tile(sides: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Sides of the box of `replicas` devices that tiles the torus, nearest to a cube."""
    divisors = [[n for n in range(1, side + 1) if side % n == 0] for side in sides]
    # Halving an even side and taking both cores of a chip is never worse, and comes first.
    return min((b for b in itertools.product(*divisors) if math.prod(b) == replicas), key=sum)


def _path(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """All places of a grid, each a neighbour of the one before."""
    if not sides:
        return [()]
    inner = _path(sides[1:])
    return [
        (i, *place) for i in range(sides[0]) for place in (reversed(inner) if i % 2 else inner)
    ]
