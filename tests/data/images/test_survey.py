"""Surveys of folders of images: splits, classes, image sizes, the holdout, and errors."""

import pathlib
from typing import Any

import pytest

from lamb_tpu.data.images.folder import FolderRecords, split_names
from lamb_tpu.data.images.survey import Survey, survey
from tests.data.images.photographs import claiming, write
from tests.raising import rejected


@pytest.mark.parametrize(
    "train, evaluated",
    [("train", "val"), ("Training", "Test"), ("train", "validation"), ("train", "photos_of_may")],
)
def test_splits_by_their_names(tmp_path: pathlib.Path, train: str, evaluated: str) -> None:
    write(
        tmp_path, f"{train}/a/1.jpg", f"{train}/b/1.jpg", f"{train}/b/2.jpg", f"{evaluated}/c/1.jpg"
    )
    assert survey(tmp_path) == Survey(train, evaluated, 3, 3, 40)


def test_val_comes_before_test(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "train/a/1.jpg", "test/a/1.jpg", "val/a/1.jpg", "extra/a/1.jpg")
    assert survey(tmp_path)[:2] == ("train", "val")


@pytest.mark.parametrize("split", ["train", "all_of_them"])
def test_one_split(tmp_path: pathlib.Path, split: str) -> None:
    write(tmp_path, f"{split}/a/1.jpg", f"{split}/b/1.jpg")
    assert survey(tmp_path) == Survey(split, split, 2, 2, 40)


def test_folders_of_classes_alone(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "cat/1.jpg", "cat/2.jpg", "dog/1.jpg")
    write(tmp_path, "dog/2.png", height=50, width=30, kind="png")
    assert split_names(tmp_path) == ["train"]
    assert survey(tmp_path) == Survey("train", "train", 4, 2, 40)
    records = FolderRecords(tmp_path, "train")
    assert [record.label for record in records.read(range(4))] == [0, 0, 1, 1]
    assert records.name(2) == str(tmp_path / "dog" / "1.jpg")


def test_list(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "1.jpg", height=90, width=80)
    lines = ["file\tsplit\tlabel", "1.jpg\ttrain\t0", "1.jpg\tval\t4"]
    (tmp_path / "labels.tsv").write_text("\n".join(lines))
    assert survey(tmp_path) == Survey("train", "val", 1, 5, 80)


def test_side_is_the_median_of_readable_images_without_decoding(tmp_path: pathlib.Path) -> None:
    for name, height, width in (("a", 100, 200), ("b", 300, 150), ("c", 60_000, 65_000)):
        (tmp_path / "train" / "x").mkdir(parents=True, exist_ok=True)
        for kind in ("rgb", "png"):
            content = claiming(kind, height, width)
            (tmp_path / "train" / "x" / f"{name}_{kind}.jpg").write_bytes(content)
    (tmp_path / "train" / "x" / "d.jpg").write_bytes(b"no image")
    assert survey(tmp_path).side == 150


@pytest.mark.parametrize(
    "names, message",
    [
        (("one/a/1.jpg", "two/a/1.jpg"), ("*", ..., "has no split called train or training, only")),
        (("train/a/1.jpg", "x/a/1.jpg", "y/a/1.jpg"), ("*", ..., "or testing, only train, x,")),
        ((), ("*", ..., "has no split called train or training")),
    ],
)
def test_ambiguous_splits(
    tmp_path: pathlib.Path, names: tuple[str, ...], message: tuple[Any, ...]
) -> None:
    write(tmp_path, *names)
    with rejected(*message):
        survey(tmp_path)


def test_no_image(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "train/a/1.jpg")
    (tmp_path / "train" / "a" / "1.jpg").write_bytes(b"")
    with rejected("*", ..., "has no image in train that can be read", "add images"):
        survey(tmp_path)


def test_holdout_partitions_the_images(tmp_path: pathlib.Path) -> None:
    names = [f"{kind}/{index}.jpg" for kind in ("cat", "dog") for index in range(300)]
    write(tmp_path, *names)

    def split_by(share: float) -> list[set[str]]:
        return [
            {records.name(index) for index in range(len(records))}
            for records in (
                FolderRecords(tmp_path, "train", holdout=share, training=training)
                for training in (True, False)
            )
        ]

    train, evaluated = split_by(0.2)
    assert not train & evaluated and len(train | evaluated) == 600
    assert 85 < len(evaluated) < 155  # 120 plus or minus four standard deviations
    assert 40 < sum("/cat/" in name for name in evaluated) < 80  # 60 of each class are expected
    (tmp_path / "cat" / "new.jpg").write_bytes(b"")  # does not move other images
    assert evaluated - split_by(0.2)[1] == set() and split_by(0.3)[1] > evaluated
    with rejected("config.data.options.holdout", 1e-09, "leaves no image of"):
        split_by(1e-9)
