"""An order of a TPU's devices in which consecutive devices are neighbours on the torus.

A group of BatchNorm consists of consecutive examples, which are on consecutive devices. So the order
of the devices determines how far a group's sums travel.
"""

import itertools
import math
from collections.abc import Sequence

import jax

# Largest group that consists of consecutive replicas in the EfficientNet paper; larger groups are
# tiles of the torus.
LARGEST_RING = 16


def order(devices: Sequence[jax.Device], replicas: int) -> list[jax.Device]:
    """Orders the devices of one slice so that each group of `replicas` devices is close together.

    A group of at most 16 replicas is a segment of a path through the entire torus. The path goes from
    neighbour to neighbour and visits the two cores of a chip consecutively. A larger group is a
    tile, as in the EfficientNet paper: the box with `replicas` devices that tiles the torus and has
    the smallest sum of sides. On a flat torus, this is the rectangle nearest to a square. Within a
    tile, consecutive devices are again neighbours.

    TPU devices have `coords`, the chip's (x, y, z), and `core_on_chip`. The order is unchanged if
    devices have no coordinates or do not fill a box.

    Raises:
      ValueError: `replicas` does not divide the number of devices.

    References:
      Wongpanich et al., Training EfficientNets at Supercomputer Scale, arXiv:2011.00071.
    """
    if type(replicas) is not int or replicas < 1 or len(devices) % replicas:
        raise ValueError(
            f"replicas={replicas!r} must be a whole number that divides the number of devices, "
            f"{len(devices)}"
        )
    if not all(hasattr(device, "coords") for device in devices):
        return list(devices)
    # As in JAX's device ids, the core on a chip varies fastest, then x.
    device_at = {(*reversed(d.coords), getattr(d, "core_on_chip", 0)): d for d in devices}
    # Coordinates of a slice need not start at 0, so use indices into the sorted coordinates.
    ticks = [sorted(set(axis)) for axis in zip(*device_at)]
    sides = [len(axis) for axis in ticks]
    if not len(device_at) == len(devices) == math.prod(sides):
        return list(devices)
    # If the entire torus is one tile, the order is a single path.
    tile = sides if replicas <= LARGEST_RING else _tile(sides, replicas)
    tiles = [side // length for side, length in zip(sides, tile)]
    return [
        device_at[tuple(axis[c * n + i] for axis, c, n, i in zip(ticks, corner, tile, inside))]
        for corner in _path(tiles)
        for inside in _path(tile)
    ]


def _tile(sides: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Returns the sides of the box of `replicas` devices that tiles the torus and is nearest to a cube."""
    divisors = [[n for n in range(1, side + 1) if side % n == 0] for side in sides]
    # `min` takes the first of several boxes with equal sums. A box with both cores of its chips never
    # has a larger sum than one with a single core of each chip.
    return min((b for b in itertools.product(*divisors) if math.prod(b) == replicas), key=sum)


def _path(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all positions of a grid in an order in which consecutive positions are neighbours."""
    if not sides:
        return [()]
    inner = _path(sides[1:])
    return [
        # Reverse every other row, so that each row begins beside the end of the previous row.
        (i, *position)
        for i in range(sides[0])
        for position in (reversed(inner) if i % 2 else inner)
    ]
