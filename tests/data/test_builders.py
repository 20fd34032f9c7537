"""Tests that the builders give the original examples and have the metadata of TFDS's builders."""

import gzip
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lamb_tpu import data
from lamb_tpu.data.builders import BUILDERS, Cifar10, read_idx
from tests.data import tiny_cifar
from tests.shared import ROOT, shared


def ordered(images: np.ndarray, labels: np.ndarray) -> list[bytes]:
    """Returns the examples as sorted bytes, because TFDS shuffles them."""
    return sorted(image.tobytes() + bytes([label]) for image, label in zip(images, labels))


@pytest.mark.long
@pytest.mark.parametrize(
    "split, prefix, length", [("train", "train", 60000), ("test", "t10k", 10000)]
)
def test_mnist_equals_originals(prepared_dir: str, split: str, prefix: str, length: int) -> None:
    source = data.load("mnist", split, data_dir=prepared_dir)
    assert len(source) == length and source.num_classes == 10
    folder = shared("data", "mnist")
    # Parsed independently: a header of 16 or 8 bytes, then a byte for each pixel or label.
    with gzip.open(folder / f"{prefix}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    arrays = source.arrays
    assert arrays["image"].dtype == np.uint8 and arrays["label"].dtype == np.int32
    assert ordered(arrays["image"], arrays["label"].astype(np.uint8)) == ordered(images, labels)


def test_tfds_reads_the_prepared_set(prepared_dir: str) -> None:
    ours = data.load("mnist", "test[:50]", data_dir=prepared_dir).arrays
    theirs = data.load("tfds:mnist", "test[:50]", data_dir=prepared_dir).arrays
    np.testing.assert_array_equal(ours["image"], theirs["image"])
    np.testing.assert_array_equal(ours["label"], theirs["label"])


def test_cifar10_from_a_tiny_archive(cifar_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = tiny_cifar.write(tmp_path)
    for split, (images, labels) in expected.items():
        source = data.load(
            "cifar10", split, data_dir=str(tmp_path / "prepared"), source_dir=str(cifar_dir)
        )
        assert source.element_spec["image"] == data.FieldSpec((32, 32, 3), np.dtype(np.uint8))
        assert set(source.element_spec) == {"image", "label"}
        arrays = source.arrays
        assert arrays["label"].dtype == np.int32
        assert ordered(arrays["image"], arrays["label"].astype(np.uint8)) == ordered(images, labels)
    info = Cifar10(data_dir=str(tmp_path / "prepared")).info
    assert info.features["label"].names == tiny_cifar.CLASS_NAMES


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_metadata_equals_that_of_tfds(name: str, tmp_path: pathlib.Path) -> None:
    stock, ours = tfds.builder(name, data_dir=str(tmp_path)), BUILDERS[name](data_dir=str(tmp_path))
    assert type(stock) is not type(ours)  # our class has not replaced the stock builder
    assert (ours.name, ours.version) == (stock.name, stock.version)
    assert repr(ours.info.features) == repr(stock.info.features)
    assert ours.info.supervised_keys == stock.info.supervised_keys
    assert ours.url_infos == stock.url_infos and ours.url_infos


def test_read_idx(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "array.gz"
    with gzip.open(path, "wb") as file:
        file.write(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
    np.testing.assert_array_equal(read_idx(str(path)), [[1, 2, 3], [4, 5, 6]])


def test_tensorflow_is_never_imported(tmp_path: pathlib.Path) -> None:
    tiny_cifar.write(tmp_path)
    script = f"""
import pathlib, sys
from lamb_tpu import data
from tests.data import tiny_cifar
tiny_cifar.expect(pathlib.Path({str(tmp_path)!r}))
arguments = dict(data_dir={str(tmp_path / "prepared")!r}, source_dir={str(tmp_path)!r})
data.load("cifar10", "train", **arguments)
source = data.load("cifar10", "train", in_memory=False, **arguments)
assert next(data.TrainLoader(source, 8, 0))["image"].shape == (8, 32, 32, 3)
assert len(list(data.eval_batches(source, 32))) == 2
next(data.TrainLoader(data.load("digits", "train"), 8, 0))
assert "tensorflow" not in sys.modules
print("finished")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1:] == ["finished"], done.stderr
