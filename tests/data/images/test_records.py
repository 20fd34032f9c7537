"""Photographs in a set prepared by TFDS, read without decoding them, by `data.load`."""

import io
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lamb_tpu import data
from lamb_tpu.data.images.records import Record, TfdsRecords
from lamb_tpu.data.images.source import ImageSource
from lamb_tpu.errors import UserError
from tests.data.images.pictures import bilinear, decode, encode, smooth

CONTENTS = [
    encode(smooth(40 + 3 * index, 60 - index, index), ("rgb", "grey", "png")[index % 3])
    for index in range(12)
]


class TinyPhotos(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Twelve pictures of as many sizes, in order."""

    VERSION = tfds.core.Version("1.0.0")
    name = "tiny_photos"
    url_infos = {}

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(num_classes=5),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict]]:
        for index, content in enumerate(CONTENTS):
            yield (
                index,
                {"image": io.BytesIO(content), "label": index % 5, "file_name": f"n{index}.JPEG"},
            )


@pytest.fixture(scope="module")
def photos_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("photos"))
    TinyPhotos(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


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
        whole = decode(CONTENTS[index])
        side = min(whole.shape[:2])
        top, left = ((extent - side + 1) // 2 for extent in whole.shape[:2])
        expected = bilinear(whole[top : top + side, left : left + side], 24)
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
    "options, message",
    [
        ({"sise": 3}, r"config.data.options.sise is unknown; tfds:tiny_photos has, .*size = 224"),
        ({"num_classes": 4}, "options.num_classes is 4, data set tfds:tiny_photos has 5 classes"),
        ({"num_classes": -1}, "options.num_classes must lie in 0"),
        ({"crop": "random"}, "config.data.options.crop is 'random'; known are 'inception', 'pad'"),
    ],
)
def test_mistakes(photos_dir: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(photos_dir, **options)


def test_imagenet_has_to_be_prepared(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="imagenet2012 is not prepared in .*array_record"):
        data.load("imagenet2012", "train", data_dir=str(tmp_path))


class Broken:
    """A TFDS source whose files are damaged."""

    def __getitems__(self, indices: list[int]) -> list[dict]:
        raise RuntimeError("DATA_LOSS: chunk\n is corrupt")


def test_damaged_files_are_told() -> None:
    with pytest.raises(UserError, match=r"record in /photos cannot .* \(DATA_LOSS: chunk is corr"):
        TfdsRecords(Broken(), 5, "/photos").read([0])
