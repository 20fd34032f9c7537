"""Images in memory: all augmentations that the options allow occur, with equal probability."""

import pathlib
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.images.arrays import ArrayOptions, AugmentedArraySource
from tests.data import tiny_cifar
from tests.raising import rejected

SIDE, PAD = 8, 2
ARRAYS = {
    "image": np.random.default_rng(0).integers(0, 256, (6, SIDE, SIDE, 3), np.uint8),
    "label": np.arange(6, dtype=np.int32),
}


def source(seed: int = 0, **options: object) -> AugmentedArraySource:
    return AugmentedArraySource("own", ARRAYS, 6, ArrayOptions(**options), seed)


def padded(image: np.ndarray, mode: str) -> np.ndarray:
    """Pads an image pixel by pixel, from the definition of the mode."""
    result = np.zeros((SIDE + 2 * PAD, SIDE + 2 * PAD, 3), np.uint8)
    for row in range(len(result)):
        for column in range(len(result)):
            at = []
            for coordinate in (row - PAD, column - PAD):
                mirrored = -coordinate if coordinate < 0 else 2 * (SIDE - 1) - coordinate
                at.append(
                    coordinate if 0 <= coordinate < SIDE else mirrored if mode == "reflect" else -1
                )
            if min(at) >= 0:
                result[row, column] = image[at[0], at[1]]
    return result


@pytest.mark.parametrize("mode", ["reflect", "zero"])
def test_every_move_and_both_ways_round(mode: str) -> None:
    batch = source(pad=PAD, pad_mode=mode, flip=True).gather(np.full(4000, 3), np.arange(4000))
    assert (batch["label"] == 3).all() and batch["image"].dtype == np.uint8
    padded_image, num_offsets = padded(ARRAYS["image"][3], mode), 2 * PAD + 1
    allowed = {}
    for top in range(num_offsets):
        for left in range(num_offsets):
            window = padded_image[top : top + SIDE, left : left + SIDE]
            for flipped in (False, True):
                key = (window[:, ::-1] if flipped else window).tobytes()
                allowed[key] = (top, left, flipped)
    counts = dict.fromkeys(allowed.values(), 0)
    for image in batch["image"]:
        counts[allowed[image.tobytes()]] += 1
    expected = 4000 / (2 * num_offsets**2)
    assert len(counts) == 50
    assert all(abs(count - expected) < 4.5 * np.sqrt(expected) for count in counts.values())


def test_cutout_has_the_mean_colour() -> None:
    batch = source(cutout=3).gather(np.full(3000, 2), np.arange(3000))["image"]
    mean = np.rint(ARRAYS["image"].astype(float).mean((0, 1, 2)))
    counts = np.zeros((SIDE - 2, SIDE - 2), int)
    for image in batch:
        rows, columns = np.nonzero((image != ARRAYS["image"][2]).any(-1))
        top, left = rows.min(), columns.min()
        assert len(rows) == 9 and rows.max() == top + 2 and columns.max() == left + 2
        assert (image[top : top + 3, left : left + 3] == mean).all()
        counts[top, left] += 1
    expected = 3000 / counts.size
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected)).all()


def test_examples_are_a_function_of_seed_epoch_and_index() -> None:
    options = {"pad": PAD, "flip": True, "cutout": 2}
    indices, epochs = np.arange(60) % 6, np.arange(60) // 6
    together = source(**options).gather(indices, epochs)["image"]
    alone = [
        source(**options).gather(np.array([index]), epoch)["image"][0]
        for index, epoch in zip(indices[::-1], epochs[::-1])
    ]
    np.testing.assert_array_equal(together, alone[::-1])
    assert (together[:6] != together[6:12]).any()
    assert (together != source(seed=1, **options).gather(indices, epochs)["image"]).any()
    same = source().gather(indices, epochs)["image"]
    np.testing.assert_array_equal(same, ARRAYS["image"][indices])


def test_arrays_stay_as_they_were() -> None:
    before = ARRAYS["image"].copy()
    source(flip=True, cutout=4).gather(np.arange(6))
    np.testing.assert_array_equal(ARRAYS["image"], before)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pad": 8}, ("config.data.options.pad", 8, "is out of range")),
        ({"cutout": 9}, ("config.data.options.cutout", 9, "is out of range")),
        ({"pad_mode": "wrap"}, ("config.data.options.pad_mode", "wrap", "is unknown")),
    ],
)
def test_errors(options: dict, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        source(**options)


def test_cifar10(cifar_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    originals = tiny_cifar.write(tmp_path)["train"][0]
    folders = {"data_dir": str(tmp_path), "source_dir": str(cifar_dir)}
    options = {"pad": 4, "flip": True}

    def load(**arguments: object) -> data.Source:
        return data.load("cifar10", "train", **folders, **arguments)

    plain, evaluated = load(), load(options=options, training=False)
    for one in (plain, evaluated):
        assert type(one) is data.ArraySource and one.in_memory
        assert {image.tobytes() for image in one.arrays["image"]} == {
            image.tobytes() for image in originals
        }
    ours = load(options=options, seed=5)
    assert (ours.name, ours.num_classes, ours.in_memory) == ("cifar10:train", 10, False)
    assert len(ours) == tiny_cifar.NUM_TRAIN
    moved = ours.gather(np.arange(40))["image"]
    assert (moved != plain.arrays["image"]).any((1, 2, 3)).sum() > 30
    with rejected("config.data.options.size", ..., "is unknown"):
        load(options={"size": 32})
