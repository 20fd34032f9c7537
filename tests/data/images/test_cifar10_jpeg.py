"""CIFAR-10 as a file of JPEGs."""

import pathlib

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.images import cifar10_jpeg
from lamb_tpu.data.images.cifar10_jpeg import FILE, load_cifar10_jpeg
from tests.data.images.photographs import decode, encode, smooth
from tests.raising import rejected
from tests.shared import shared

CONTENTS = {
    split: [encode(smooth(32, 32, seed), quality=75) for seed in seeds]
    for split, seeds in (("train", range(7)), ("test", range(7, 10)))
}


def write(folder: pathlib.Path, contents: dict[str, list[bytes]]) -> str:
    arrays = {}
    for split, encoded in contents.items():
        arrays[f"{split}_jpeg"] = np.frombuffer(b"".join(encoded), np.uint8)
        arrays[f"{split}_offsets"] = np.cumsum([0, *map(len, encoded)])
        arrays[f"{split}_labels"] = np.arange(len(encoded), dtype=np.uint8) % 10
    np.savez_compressed(folder / FILE, **arrays)
    return str(folder)


def test_pixels_and_labels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10_jpeg, "_CHUNK", 2)
    folder = write(tmp_path, CONTENTS)
    source = load_cifar10_jpeg("test+train[2:4]", folder)
    assert source.name == "cifar10_jpeg:test+train[2:4]" and source.num_classes == 10
    expected = [decode(content) for content in CONTENTS["test"] + CONTENTS["train"][2:4]]
    np.testing.assert_array_equal(source.arrays["image"], expected)
    assert source.arrays["label"].tolist() == [0, 1, 2, 2, 3]
    assert source.arrays["label"].dtype == np.int32


def test_loaded_by_name(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, CONTENTS)
    options = {"pad": 4, "flip": True, "cutout": 8}
    ours, plain = (
        data.load("cifar10_jpeg", "train", source_dir=folder, options=options, training=training)
        for training in (True, False)
    )
    assert not ours.in_memory and type(plain) is data.ArraySource
    images = ours.gather(np.arange(7))["image"]
    assert images.shape == (7, 32, 32, 3) and (images != plain.arrays["image"]).any()


def test_errors(tmp_path: pathlib.Path) -> None:
    for folder in (None, str(tmp_path)):
        with rejected("config.data.dir", ..., "does not hold cifar10_jpeg_q75.npz"):
            load_cifar10_jpeg("train", folder)
    (tmp_path / FILE).write_bytes(b"PK")
    with rejected("*/cifar10_jpeg_q75.npz", ..., "is not the file of CIFAR-10 as JPEGs"):
        load_cifar10_jpeg("train", str(tmp_path))
    np.savez(tmp_path / FILE, train_jpeg=np.zeros(3, np.uint8))
    with rejected("*/cifar10_jpeg_q75.npz", ..., "is not the file of CIFAR-10 as JPEGs"):
        load_cifar10_jpeg("train", str(tmp_path))
    broken = {"train": [CONTENTS["train"][0], CONTENTS["train"][1][:-30]], "test": []}
    with rejected("*/cifar10_jpeg_q75.npz", ..., "is not the file of CIFAR-10 as JPEGs"):
        load_cifar10_jpeg("train", write(tmp_path, broken))
    with rejected("split 'dev' of data set cifar10_jpeg", ..., "is not valid (Unknown split"):
        load_cifar10_jpeg("dev", write(tmp_path, CONTENTS))


def test_the_real_file() -> None:
    folder = shared("data", "cifar10")
    source = load_cifar10_jpeg("test[:300]", str(folder))
    with np.load(folder / FILE) as stored:
        bounds, content = stored["test_offsets"], stored["test_jpeg"]
        labels = stored["test_labels"][:300]
    np.testing.assert_array_equal(source.arrays["label"], labels)
    for index in (0, 299):
        expected = decode(content[bounds[index] : bounds[index + 1]].tobytes())
        np.testing.assert_array_equal(source.arrays["image"][index], expected)
