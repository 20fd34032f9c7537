"""Original files read without TFDS give the same examples in the same order as TFDS."""

import hashlib
import pathlib
import shutil

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data import originals
from lamb_tpu.data.builders import BUILDERS
from tests.data import tiny_cifar
from tests.raising import rejected
from tests.shared import shared


@pytest.mark.parametrize("name", originals.SETS)
def test_files_and_lengths_are_those_of_tfds(name: str, tmp_path: pathlib.Path) -> None:
    builder = BUILDERS[name](data_dir=str(tmp_path))
    assert originals.SETS[name].files == {
        info.filename: info.checksum for info in builder.url_infos.values()
    }
    assert set(BUILDERS) == set(originals.SETS)


def test_mnist_equals_the_prepared_set(prepared_dir: str) -> None:
    folder = str(shared("data", "mnist"))
    for split in ("test", "test[100:300]"):
        expected = data.load("mnist", split, data_dir=prepared_dir)
        actual = data.load("mnist", split, data_dir="/nowhere", source_dir=folder)
        assert actual.name == expected.name and actual.num_classes == expected.num_classes
        assert actual.element_spec == expected.element_spec
        for field, array in expected.arrays.items():
            np.testing.assert_array_equal(actual.arrays[field], array)


@pytest.mark.long
def test_mnist_equals_the_prepared_training_set(prepared_dir: str) -> None:
    folder = str(shared("data", "mnist"))
    expected = data.load("mnist", "train", data_dir=prepared_dir)
    actual = data.load("mnist", "train", source_dir=folder)
    for field, array in expected.arrays.items():
        np.testing.assert_array_equal(actual.arrays[field], array)


def test_cifar10_equals_the_prepared_set(
    cifar_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256((cifar_dir / tiny_cifar.FILE_NAME).read_bytes()).hexdigest()
    lengths = {"train": tiny_cifar.NUM_TRAIN, "test": tiny_cifar.NUM_TEST}
    for split in ("train", "test", "test+train"):
        expected = data.load(
            "cifar10", split, data_dir=str(tmp_path / "prepared"), source_dir=str(cifar_dir)
        )
        # TFDS has read the file, because its sha256 is not the original's.
        assert (tmp_path / "prepared" / "cifar10").exists()
        with monkeypatch.context() as patched:
            tiny = originals._Set({tiny_cifar.FILE_NAME: digest}, lengths)
            patched.setitem(originals.SETS, "cifar10", tiny)
            actual = data.load("cifar10", split, data_dir="/nowhere", source_dir=str(cifar_dir))
        assert actual.name == expected.name
        assert actual.element_spec == expected.element_spec
        for field, array in expected.arrays.items():
            np.testing.assert_array_equal(actual.arrays[field], array)


def test_other_files_are_left_to_tfds(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(shared("data", "mnist"), folder, copy_function=shutil.copyfile)
    assert originals.load("mnist", "test", str(folder)) is not None
    assert originals.load("mnist", "test", None) is None
    assert originals.load("digits", "test", str(folder)) is None
    assert originals.load("fashion_mnist", "test", str(folder)) is None  # has the same file names
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    assert originals.load("mnist", "test", str(folder)) is None


def test_a_split_that_is_none_is_named() -> None:
    with rejected(
        "split 'dev' of data set mnist", ..., "is not valid (Unknown split 'dev'. Should"
    ):
        originals.load("mnist", "dev", str(shared("data", "mnist")))
