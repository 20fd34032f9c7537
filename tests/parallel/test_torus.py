"""Tests an order of devices in which groups of BatchNorm are paths or tiles of the torus."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu.models.norm import BatchNorm
from lamb_tpu.parallel import torus


@dataclasses.dataclass(frozen=True)
class Core:
    """The attributes of a TPU device that `order` reads."""

    coords: tuple[int, int, int]
    core_on_chip: int

    @property
    def place(self) -> tuple[int, ...]:
        return (*self.coords, self.core_on_chip)


def slice_of(x: int, y: int, z: int, cores: int, first: int = 0) -> list[Core]:
    """Returns the devices of a slice of x * y * z chips, in random order.

    `cores` is the number of cores per chip, and `first` the smallest coordinate along each axis.
    """
    places = itertools.product(*(range(first, first + side) for side in (x, y, z)), range(cores))
    devices = [Core(tuple(place), core) for *place, core in places]
    random.Random(0).shuffle(devices)
    return devices


def groups_of(devices: Sequence[Core], replicas: int) -> list[list[Core]]:
    ordered = torus.order(devices, replicas)
    assert len(ordered) == len(devices) and set(ordered) == set(devices)
    return [ordered[i : i + replicas] for i in range(0, len(ordered), replicas)]


def hops(a: Core, b: Core) -> int:
    """Returns the number of links between two chips."""
    return sum(abs(i - j) for i, j in zip(a.coords, b.coords))


V3, V4, V5E = (32, 32, 1, 2), (8, 8, 8, 1), (16, 16, 1, 1)


@pytest.mark.parametrize(
    "shape, replicas",
    [
        (shape, replicas)
        for shape in (V3, V4, V5E, (4, 2, 1, 2), (3, 5, 2, 1), (1, 1, 1, 2))
        for replicas in (1, 2, 4, 5, 8, 10, 16)
        if math.prod(shape) % replicas == 0
    ],
)
def test_up_to_16_a_group_is_a_path(shape: tuple[int, ...], replicas: int) -> None:
    for group in groups_of(slice_of(*shape), replicas):
        assert all(hops(*pair) <= 1 for pair in itertools.pairwise(group))
        if replicas % 2 == 0 and shape[3] == 2:  # groups have both cores of a chip, consecutively
            chips = [device.coords for device in group]
            assert chips[::2] == chips[1::2] and len(set(chips)) == replicas // 2


# `tile` has the sides of a tile along x, y, z, in chips.
@pytest.mark.parametrize(
    "shape, replicas, tile",
    [
        (V3, 32, (4, 4, 1)),
        (V3, 64, (8, 4, 1)),
        (V3, 128, (8, 8, 1)),
        (V3, 2048, (32, 32, 1)),
        (V5E, 32, (8, 4, 1)),
        (V5E, 64, (8, 8, 1)),
        (V4, 32, (4, 4, 2)),
        (V4, 64, (4, 4, 4)),
        (V4, 256, (8, 8, 4)),
        ((2, 64, 1, 1), 32, (2, 16, 1)),
        ((64, 2, 1, 1), 32, (16, 2, 1)),
        ((32, 1, 1, 1), 32, (32, 1, 1)),
        ((6, 6, 1, 1), 18, (6, 3, 1)),
        ((3, 3, 1, 2), 18, (3, 3, 1)),
        ((17, 2, 1, 2), 34, (17, 1, 1)),
    ],
)
def test_above_a_group_is_a_tile(
    shape: tuple[int, ...], replicas: int, tile: tuple[int, ...]
) -> None:
    for group in groups_of(slice_of(*shape, first=2), replicas):
        places = np.array([device.place for device in group])
        low, high = places.min(0), places.max(0)
        assert tuple(high - low + 1) == (*tile, shape[3])
        assert np.all((low[:3] - 2) % tile == 0)
        assert math.prod(high - low + 1) == len(set(map(tuple, places))) == replicas
        assert all(hops(*pair) <= 1 for pair in itertools.pairwise(group))


def test_no_other_box_is_nearer_to_a_cube() -> None:
    """Compares the tile's sum of sides with the minimum over all boxes that tile the torus."""
    for shape in ((4, 6, 2, 1), (8, 3, 1, 2), (12, 4, 1, 1)):
        total = math.prod(shape)
        for replicas in range(torus.LARGEST_RING + 1, total):
            if total % replicas:
                continue
            sums = []
            for sides in itertools.product(*(range(1, side + 1) for side in shape)):
                covers = all(side % length == 0 for side, length in zip(shape, sides))
                if covers and math.prod(sides) == replicas:
                    sums.append(sum(sides[:3]))
            first = np.array([d.place for d in groups_of(slice_of(*shape), replicas)[0]])
            assert sum((first.max(0) - first.min(0) + 1)[:3]) == min(sums)


def test_without_coordinates_or_with_holes_the_order_stays() -> None:
    assert torus.order(jax.devices(), 8) == jax.devices()
    holes = slice_of(6, 6, 1, 1)[:32]
    assert torus.order(holes, 32) == holes


@pytest.mark.parametrize("replicas", [0, -4, 5, 2.0, True, 64])
def test_replicas_that_do_not_divide(replicas: Any) -> None:
    message = f"replicas={replicas} must be a whole number that divides the number of devices, 32"
    with pytest.raises(ValueError, match=message):
        torus.order(slice_of(4, 8, 1, 1), replicas)


def test_groups_of_batch_norm_are_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses eight CPU devices as a torus of 4 x 2 chips with tiles of 2 x 2."""
    monkeypatch.setattr(torus, "LARGEST_RING", 2)
    stands_for = dict(zip(slice_of(4, 2, 1, 1), jax.devices()))
    ordered = torus.order(list(stands_for), 4)
    tiles = [{stands_for[core] for core in stands_for if core.coords[0] // 2 == i} for i in (0, 1)]

    devices = np.array([stands_for[core] for core in ordered])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (32, 5))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    norm = BatchNorm(16, use_running_average=False)
    variables = norm.init(jax.random.key(0), x)
    y = jax.jit(lambda x: norm.apply(variables, x, mutable="batch_stats")[0])(x)
    for tile in tiles:
        shards = [s.data for s in y.addressable_shards if s.device in tile]
        examples = np.concatenate([np.asarray(shard) for shard in shards])
        assert examples.shape == (16, 5)
        np.testing.assert_allclose(examples.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(examples.std(0), 1, rtol=1e-4)
