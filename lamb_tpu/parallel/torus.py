"""An order of a TPU's devices in which consecutive devices are neighbours on the torus.

A group of BatchNorm is a run of consecutive examples, so of consecutive devices. The order of the
devices decides how far a group's sums travel.
"""

import itertools
import math
from collections.abc import Sequence

import jax

# The EfficientNet paper groups consecutive replicas up to this number, tiles of the torus above it.
LARGEST_RING = 16


def order(devices: Sequence[jax.Device], replicas: int) -> list[jax.Device]:
    """Orders the devices of one slice so that every run of `replicas` devices is close together.

    Up to 16 replicas, a group is a piece of a path through the whole torus, which goes from
    neighbour to neighbour and visits both cores of a chip in a row. Above, as in the EfficientNet
    paper, a group is a tile. Of all boxes with `replicas` devices that tile the torus, the one
    with the smallest sum of sides is taken; on a flat torus that is the rectangle nearest to a
    square. Within a tile the order is again a path.

    Args:
      devices: devices of one kind. TPU devices have `coords`, the chip's (x, y, z), and
        `core_on_chip`.
      replicas: number of devices in a group.

    Returns:
      All devices. Their order is unchanged if they have no coordinates or do not fill a box.

    Raises:
      ValueError: `replicas` is not a whole number of at least 1 that divides the number of devices.

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
    # As in JAX' device ids, the core on a chip varies fastest, then x.
    at = {(*reversed(d.coords), getattr(d, "core_on_chip", 0)): d for d in devices}
    # Coordinates of a slice need not start at 0, so places are counted in ticks of each axis.
    ticks = [sorted(set(axis)) for axis in zip(*at)]
    sides = [len(axis) for axis in ticks]
    if not len(at) == len(devices) == math.prod(sides):
        return list(devices)
    # With the whole torus as one tile the order is a single path.
    tile = sides if replicas <= LARGEST_RING else _tile(sides, replicas)
    tiles = [side // length for side, length in zip(sides, tile)]
    return [
        at[tuple(axis[c * n + i] for axis, c, n, i in zip(ticks, corner, tile, inside))]
        for corner in _path(tiles)
        for inside in _path(tile)
    ]


def _tile(sides: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Sides of the box of `replicas` devices, nearest to a cube, that tiles the torus."""
    divisors = [[n for n in range(1, side + 1) if side % n == 0] for side in sides]
    # Of boxes with equal sums the first counts. Taking both cores of a chip is never worse.
    return min((b for b in itertools.product(*divisors) if math.prod(b) == replicas), key=sum)


def _path(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """All places of a grid in an order in which each is a neighbour of the one before."""
    if not sides:
        return [()]
    inner = _path(sides[1:])
    return [
        # Every other row is walked backwards, so that the next one begins beside its end.
        (i, *place)
        for i in range(sides[0])
        for place in (reversed(inner) if i % 2 else inner)
    ]
