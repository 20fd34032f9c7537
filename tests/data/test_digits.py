"""The bundled digits data set: its content, splits and licence text."""

import hashlib
from importlib import resources

import numpy as np
import pytest

from lamb_tpu import data
from tests.raising import rejected

FILES = resources.files("lamb_tpu.data").joinpath("files")


def test_content() -> None:
    train, test = data.load("digits", "train"), data.load("digits", "test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.num_classes == 10 and train.in_memory
    assert train.element_spec == {
        "image": data.FieldSpec((8, 8, 1), np.dtype(np.uint8)),
        "label": data.FieldSpec((), np.dtype(np.int32)),
    }
    everything = data.load("digits", "train+test").gather(np.arange(1797))
    assert everything["image"].max() == 16
    # The class counts that the UCI page states for the 1,797 scans.
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(everything["label"]).tolist() == counts
    # The first scan is a zero: a ring with nothing in the middle.
    first = everything["image"][0, :, :, 0]
    assert everything["label"][0] == 0
    assert first[3].tolist() == [0, 4, 12, 0, 0, 8, 8, 0]


def test_splits_do_not_overlap() -> None:
    train, test, both = (data.load("digits", split) for split in ("train", "test", "train+test"))
    joined = np.concatenate([train.arrays["image"], test.arrays["image"]])
    np.testing.assert_array_equal(joined, both.arrays["image"])
    # No test scan is a copy of a training scan.
    scans = {image.tobytes() for image in train.arrays["image"]}
    assert not any(image.tobytes() in scans for image in test.arrays["image"])


@pytest.mark.parametrize(
    "split, expected",
    [
        ("train[:100]", np.arange(100)),
        ("train[-7:]", np.arange(1430, 1437)),
        ("test[50%:]", np.arange(1437 + 180, 1797)),
        ("train[10:12]+test[:1]", np.array([10, 11, 1437])),
    ],
)
def test_slices(split: str, expected: np.ndarray) -> None:
    everything = data.load("digits", "train+test").arrays["image"]
    np.testing.assert_array_equal(data.load("digits", split).arrays["image"], everything[expected])


@pytest.mark.parametrize("split", ["trian", "train[:0]", "train[:2000]", "train[", ""])
def test_bad_split_is_rejected(split: str) -> None:
    with rejected(f"split {split!r} of data set digits"):
        data.load("digits", split)


def test_readme_states_the_file() -> None:
    content = FILES.joinpath("digits.npz").read_bytes()
    readme = FILES.joinpath("README.md").read_text()
    assert hashlib.sha256(content).hexdigest() in readme
    assert "CC BY 4.0" in readme and "Alpaydin" in readme
