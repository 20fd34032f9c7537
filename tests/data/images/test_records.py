"""Photographs in a set prepared by TFDS, decoded only when an example is read."""

import io
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lamb_tpu import data
from lamb_tpu.data.images.records import Record, TfdsRecords
from lamb_tpu.data.images.source import ImageSource
from tests.data.images.photographs import bilinear, decode, encode, smooth
from tests.data.tiny_tfds import Tiny
from tests.raising import rejected

CONTENTS = [
    encode(smooth(40 + 3 * index, 60 - index, index), ("rgb", "grey", "png")[index % 3])
    for index in range(12)
]


class TinyPhotos(Tiny, skip_registration=True):
    """Twelve images of different sizes, in order."""

    name = "tiny_photos"
    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(num_classes=5),
        "file_name": tfds.features.Text(),
    }
    examples = [
        {"image": io.BytesIO(content), "label": index % 5, "file_name": f"n{index}.JPEG"}
        for index, content in enumerate(CONTENTS)
    ]


@pytest.fixture(scope="module")
def photos_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return TinyPhotos.prepare(tmp_path_factory.mktemp("photos"))


def load(folder: str, split: str = "train", **options: object) -> data.Source:
    return data.load(
        "tfds:tiny_photos", split, data_dir=folder, options={"size": 24} | options, training=False
    )


def test_set_prepared_by_tfds(photos_dir: str) -> None:
    source = load(photos_dir, "train[2:]", central_fraction=1.0)
    assert isinstance(source, ImageSource) and len(source) == 10 and source.num_classes == 5
    assert source.name == "tfds:tiny_photos:train[2:]"
    assert load(photos_dir, num_classes=9).num_classes == 9
    batch = source.gather(np.array([9, 0, 4]))
    assert batch["label"].tolist() == [1, 2, 1]
    for image, index in zip(batch["image"], (11, 2, 6)):
        full = decode(CONTENTS[index])
        side = min(full.shape[:2])
        top, left = ((extent - side + 1) // 2 for extent in full.shape[:2])
        expected = bilinear(full[top : top + side, left : left + side], 24)
        if side < 48:
            assert np.abs(image - expected).max() < 1.6
        assert np.abs(image - expected).mean() < 6
    assert source.tally.counts() == {"png": 2}


def test_bytes_and_names(photos_dir: str) -> None:
    builder = tfds.builder_from_directory(f"{photos_dir}/tiny_photos/1.0.0")
    records = builder.as_data_source("train", decoders={"image": tfds.decode.SkipDecoding()})
    ours = TfdsRecords(records, 5, photos_dir)
    assert ours.read([3, 1]) == [Record(CONTENTS[3], 3), Record(CONTENTS[1], 1)]
    assert ours.name(3) == "example 3 (n3.JPEG)" and len(ours) == 12


@pytest.mark.parametrize(
    "option, value, problem",
    [
        ("num_classes", 4, "is less than the 5 classes"),
        ("num_classes", -1, "is out of range"),
        ("crop", "random", "is unknown"),
    ],
)
def test_errors(photos_dir: str, option: str, value: object, problem: str) -> None:
    with rejected(f"config.data.options.{option}", value, problem):
        load(photos_dir, **{option: value})
    with rejected("config.data.options.sise", ..., "is unknown", "data set 'tfds:tiny_photos' has"):
        load(photos_dir, sise=3)


def test_imagenet_has_to_be_prepared(tmp_path: pathlib.Path) -> None:
    with rejected("data set imagenet2012", ..., "is not prepared in", "prepare it once with"):
        data.load("imagenet2012", "train", data_dir=str(tmp_path))


class Broken:
    def __getitems__(self, indices: list[int]) -> list[dict]:
        raise RuntimeError("DATA_LOSS: chunk\n is corrupt")


def test_damaged_files_are_reported() -> None:
    with rejected("a record in /photos", ..., "is damaged or incomplete (DATA_LOSS:"):
        TfdsRecords(Broken(), 5, "/photos").read([0])
