"""Layouts of folders: which folders are splits, which are classes, and which files are images."""

import os
import pathlib
import re

import pytest

from lamb_tpu.data.images import layout
from lamb_tpu.data.images.folder import FolderRecords
from lamb_tpu.data.images.survey import survey
from lamb_tpu.errors import UserError
from tests.data.images.pictures import encode, smooth

JPEG = encode(smooth(20, 24))


def make(root: pathlib.Path, *names: str) -> pathlib.Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(JPEG)
    return root


def labels(root: pathlib.Path, split: str = "train") -> dict[str, int]:
    records = FolderRecords(root, split)
    return {
        os.path.relpath(records.name(index), root): record.label
        for index, record in enumerate(records.read(range(len(records))))
    }


def test_images_below_a_class_belong_to_it(tmp_path: pathlib.Path) -> None:
    """The layout of Tiny ImageNet."""
    make(tmp_path, "train/a/images/1.JPEG", "train/b/images/2.JPEG", "train/b/3.JPEG")
    (tmp_path / "train" / "a" / "boxes.txt").write_text("1 2 3")
    expected = {"train/a/images/1.JPEG": 0, "train/b/3.JPEG": 1, "train/b/images/2.JPEG": 1}
    assert labels(tmp_path) == expected
    assert FolderRecords(tmp_path, "train").notes == (
        f"{tmp_path}/train: skipped 1 file(s) that are not JPEG, PNG, WebP or BMP: 1 .txt",
        f"{tmp_path}/train: 2 image(s) lie deeper than in the folder of their class, such as "
        "a/images/1.JPEG; each belongs to the class of the first folder in "
        f"{tmp_path}/train",
    )
    # The same folder, given one level too deep.
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
    found = labels(make(tmp_path, *names))
    assert found == {name: classes.index(name.partition("/")[0]) for name in names}


@pytest.mark.parametrize(
    "names, message",
    [
        # One level too high, and images without folders of classes.
        (
            ("set/train/a/1.jpg", "set/val/a/1.jpg"),
            "has the splits train, val one level deeper, in {root}/set; .* config.data.dir={root}/set",
        ),
        (
            ("train/1.jpg", "val/2.jpg"),
            "has no folders of classes in train, val; an image was found at {root}/.*.jpg, and DIR/",
        ),
        (
            ("a/b/1.jpg", "a/c/1.jpg", "d/b/1.jpg"),
            "no folder 'train' for the split 'train'; it has a, d, .* an image was found at {root}/",
        ),
        (("1.jpg",), "no folder 'train' .* an image was found at {root}/1.jpg"),
    ],
)
def test_other_layouts_are_rejected_with_the_path_of_an_image(
    tmp_path: pathlib.Path, names: tuple[str, ...], message: str
) -> None:
    make(tmp_path, *names)
    with pytest.raises(UserError, match=message.replace("{root}", re.escape(str(tmp_path)))):
        FolderRecords(tmp_path, "train")
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        survey(tmp_path)


def test_a_split_whose_images_are_not_sorted(tmp_path: pathlib.Path) -> None:
    """The validation images of Tiny ImageNet lie in val/images, with a list of their classes."""
    make(tmp_path, "train/x/1.jpg", "train/y/2.jpg", "val/images/3.jpg", "test/images/4.jpg")
    records = FolderRecords(tmp_path, "train")
    assert records.num_classes == 2 and list(labels(tmp_path).values()) == [0, 1]
    assert any(
        "lie in" in note and "val/images, which names no class" in note for note in records.notes
    )
    with pytest.raises(
        UserError,
        match=(
            f"the images of the split 'val' lie in {tmp_path}/val/images, which names no class; move "
            f"images to {tmp_path}/val/CLASS, or list them with their labels in .*labels.tsv"
        ),
    ):
        FolderRecords(tmp_path, "val")


def test_an_empty_split_is_left_out_of_the_survey(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "train/x/1.jpg", "train/y/2.jpg")
    (tmp_path / "val" / "images").mkdir(parents=True)
    assert survey(tmp_path)[:2] == ("train", "train")
    assert f"{tmp_path}: the split 'val' has no image, so this split is not read" in (
        FolderRecords(tmp_path, "train").notes
    )


def test_one_class_and_images_outside_of_classes_are_reported(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "train/a/1.jpg", "train/stray.jpg")
    one, outside = FolderRecords(tmp_path, "train").notes
    assert "all images are of one class, 'a'; config.data.dir may be one level too high" in one
    assert outside.endswith("train: skipped 1 image(s) that lie outside of the folders of classes")


def test_formats_that_are_not_read_are_counted(tmp_path: pathlib.Path) -> None:
    for name in ("a/1.tif", "a/2.TIF", "b/3.gif", "b/4"):
        make(tmp_path, name)
        (tmp_path / name).write_bytes(b"GIF89a" + bytes(30))
    message = r"has no image that can be read \(JPEG, PNG, WebP, BMP\); its files are 2 .tif, "
    for attempt in (lambda: survey(tmp_path), lambda: FolderRecords(tmp_path, "train")):
        with pytest.raises(UserError, match=message + "1 .gif, 1 without an extension"):
            attempt()
    # In one of two splits alone.
    make(tmp_path, "val/a/1.jpg")
    (tmp_path / "train").mkdir()
    (tmp_path / "a").rename(tmp_path / "train" / "a")
    with pytest.raises(UserError, match="has no image in its split 'train'; .*: 2 .tif"):
        FolderRecords(tmp_path, "train")


def test_content_decides_for_other_endings(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "a/photo", "a/photo.orig", "a/photo.jpg.bak", "a/.hidden.jpg", "a/@eaDir/1.jpg")
    (tmp_path / "a" / "notes.txt").write_text("BM is no bitmap, but a text about one.")
    (tmp_path / "a" / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "a" / "pipe")  # opening it would wait for ever
    (tmp_path / "a" / "album.jpg").mkdir()
    make(tmp_path, "a/album.jpg/1.jpg", "__MACOSX/a/1.jpg")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")  # a loop
    found = layout.list_files(tmp_path / "a")
    assert found.images == ["album.jpg/1.jpg", "photo", "photo.jpg.bak", "photo.orig"]
    assert found.skipped == {".txt": 1, layout._NO_SUFFIX: 2}
    assert layout.folders(tmp_path) == ["a"]
