"""Layouts of folders: splits, classes and image files."""

import os
import pathlib

import pytest

from lamb_tpu.data.images import layout
from lamb_tpu.data.images.folder import FolderRecords
from lamb_tpu.data.images.survey import survey
from tests.data.images.photographs import write
from tests.raising import rejected


def labels(root: pathlib.Path, split: str = "train") -> dict[str, int]:
    records = FolderRecords(root, split)
    return {
        os.path.relpath(records.name(index), root): record.label
        for index, record in enumerate(records.read(range(len(records))))
    }


def test_images_below_a_class_belong_to_it(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "train/a/images/1.JPEG", "train/b/images/2.JPEG", "train/b/3.JPEG")
    (tmp_path / "train" / "a" / "boxes.txt").write_text("1 2 3")
    expected = {"train/a/images/1.JPEG": 0, "train/b/3.JPEG": 1, "train/b/images/2.JPEG": 1}
    assert labels(tmp_path) == expected
    assert FolderRecords(tmp_path, "train").notes == (
        f"{tmp_path}/train: skipped 1 file(s) that are not JPEG, PNG, WebP or BMP: 1 .txt",
        f"{tmp_path}/train: 2 image(s) are in subfolders of their class, such as "
        "a/images/1.JPEG; each belongs to the class of its outermost folder in "
        f"{tmp_path}/train",
    )
    # The given folder is one level too deep.
    assert list(labels(tmp_path / "train").values()) == [0, 1, 1]
    assert survey(tmp_path / "train")[:4] == ("train", "train", 3, 2)


@pytest.mark.parametrize(
    "names",
    [
        ("cat/images/1.jpg", "dog/images/1.jpg"),
        ("cat/1.jpg", "dog/deep/1.jpg"),
        ("cat/1.jpg", "cat/img/2.jpg", "dog/img/3.jpg"),
        ("car/1.jpg", "train/1.jpg"),
    ],
)
def test_classes_without_splits(tmp_path: pathlib.Path, names: tuple[str, ...]) -> None:
    classes = sorted({name.partition("/")[0] for name in names})
    actual = labels(write(tmp_path, *names))
    assert actual == {name: classes.index(name.partition("/")[0]) for name in names}


@pytest.mark.parametrize(
    "names, message",
    [
        # A folder one level too high, and images without class folders.
        (
            ("set/train/a/1.jpg", "set/val/a/1.jpg"),
            ("has the splits train, val one level deeper, in ", "give config.data.dir="),
        ),
        (
            ("train/1.jpg", "val/2.jpg"),
            ("has no class folders in train, val", "CLASS; an image is at "),
        ),
        (
            ("a/b/1.jpg", "a/c/1.jpg", "d/b/1.jpg"),
            ("has no folder 'train' for the split", "use a or d; an image is at "),
        ),
        (("1.jpg",), ("has no folder 'train'", "images; an image is at ")),
    ],
)
def test_other_layouts_are_rejected_with_the_path_of_an_image(
    tmp_path: pathlib.Path, names: tuple[str, ...], message: tuple[str, str]
) -> None:
    write(tmp_path, *names)
    with rejected(tmp_path, ..., *message):
        FolderRecords(tmp_path, "train")
    with rejected(tmp_path):
        survey(tmp_path)


def test_a_split_whose_images_are_not_sorted(tmp_path: pathlib.Path) -> None:
    """Tiny ImageNet has its validation images in val/images, with a list of their classes."""
    write(tmp_path, "train/x/1.jpg", "train/y/2.jpg", "val/images/3.jpg", "test/images/4.jpg")
    records = FolderRecords(tmp_path, "train")
    assert records.num_classes == 2 and list(labels(tmp_path).values()) == [0, 1]
    assert any(
        "are in" in note and "val/images, which is not a class" in note for note in records.notes
    )
    with rejected("*", ..., ": the images of the split 'val' are in", "or list them in"):
        FolderRecords(tmp_path, "val")


def test_an_empty_split_is_left_out_of_the_survey(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "train/x/1.jpg", "train/y/2.jpg")
    (tmp_path / "val" / "images").mkdir(parents=True)
    assert survey(tmp_path)[:2] == ("train", "train")
    assert f"{tmp_path}: the split 'val' has no image, so this split is not read" in (
        FolderRecords(tmp_path, "train").notes
    )


def test_one_class_and_images_outside_of_classes_are_reported(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "train/a/1.jpg", "train/stray.jpg")
    one, outside = FolderRecords(tmp_path, "train").notes
    assert "all images are of one class, 'a'; config.data.dir may be one level too high" in one
    assert outside.endswith("train: skipped 1 image(s) outside class folders")


def test_formats_that_are_not_read_are_counted(tmp_path: pathlib.Path) -> None:
    for name in ("a/1.tif", "a/2.TIF", "b/3.gif", "b/4"):
        write(tmp_path, name)
        (tmp_path / name).write_bytes(b"GIF89a" + bytes(30))
    for attempt in (lambda: survey(tmp_path), lambda: FolderRecords(tmp_path, "train")):
        with rejected("*", ..., "has no image that can be read, only 2 .tif, 1 .gif, 1 without an"):
            attempt()
    # Now only one of two splits has no supported image.
    write(tmp_path, "val/a/1.jpg")
    (tmp_path / "train").mkdir()
    (tmp_path / "a").rename(tmp_path / "train" / "a")
    with rejected("*", ..., "has no image in its split 'train'"):
        FolderRecords(tmp_path, "train")


def test_content_decides_for_other_endings(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "a/photo", "a/photo.orig", "a/photo.jpg.bak", "a/.hidden.jpg", "a/@eaDir/1.jpg")
    (tmp_path / "a" / "notes.txt").write_text("BM is no bitmap, but a text about one.")
    (tmp_path / "a" / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "a" / "pipe")  # opening it would block for ever
    (tmp_path / "a" / "album.jpg").mkdir()
    write(tmp_path, "a/album.jpg/1.jpg", "__MACOSX/a/1.jpg")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")  # a loop
    actual = layout.list_files(tmp_path / "a")
    assert actual.images == ["album.jpg/1.jpg", "photo", "photo.jpg.bak", "photo.orig"]
    assert actual.skipped == {".txt": 1, layout._NO_SUFFIX: 2}
    assert layout.folders(tmp_path) == ["a"]
