"""Training sets in device memory: the same batches as from the host, bit for bit."""

from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu.data import ArraySource, ShapeSource, held_set
from lamb_tpu.data.images.arrays import ArrayOptions, AugmentedArraySource


def arrays(rows: int = 40) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (rows, 12, 10, 3)).astype(np.uint8),
        "label": rng.integers(0, 10, rows).astype(np.int32),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"pad": 4, "flip": True, "cutout": 8},
        {"pad": 3, "pad_mode": "zero"},
        {"flip": True},
        {"cutout": 5},
        None,
    ],
)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_batches_are_those_of_the_host(options: dict[str, Any] | None, seed: int) -> None:
    source: ArraySource = ArraySource("set:train", arrays(), 10)
    if options is not None:
        source = AugmentedArraySource("set:train", arrays(), 10, ArrayOptions(**options), seed)
    held = held_set(source)
    assert held is not None
    rng = np.random.default_rng(1)
    indices, epochs = rng.integers(0, 40, 256), rng.integers(0, 9, 256)
    drawn = held.draws(indices, epochs)
    assert all(value.dtype.itemsize <= 4 and len(value) == 256 for value in drawn.values())
    actual = jax.jit(held.read)(dict(held.arrays), drawn)
    expected = source.gather(indices, epochs)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    if options is not None:  # the images are augmented
        assert (expected["image"] != source.arrays["image"][indices]).any()


def test_sets_that_devices_cannot_hold() -> None:
    class Changed(ArraySource):
        """An unsupported subclass: a subclass may override `gather`."""

    assert held_set(Changed("changed", arrays(), 10)) is None
    assert held_set(ShapeSource("shapes", {}, 10)) is None
    wide = {**arrays(), "weight": np.zeros(40)}  # float64
    assert held_set(ArraySource("wide", wide, 10)) is None
