"""Plain folders of pictures: classes by folder, or a list."""

import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from lamb_tpu import data
from lamb_tpu.data.images.folder import FolderRecords
from lamb_tpu.data.images.records import Record
from lamb_tpu.errors import UserError
from tests.data.images.pictures import decode, encode, smooth
from tests.shared import shared


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> pathlib.Path:
    """train has 3, 0 and 2 pictures of a, b and c; val has one of a and one of d."""
    for split, kind, names in (
        ("train", "a", ("2.JPEG", "10.jpg", "1.jpeg")),
        ("train", "b", ("readme.txt", ".1.jpg")),
        ("train", "c", ("x.PNG", "y.JPG")),
        ("val", "a", ("1.jpg",)),
        ("val", "d", ("2.jpg",)),
    ):
        (tmp_path / split / kind).mkdir(parents=True)
        for name in names:
            (tmp_path / split / kind / name).write_bytes(f"{split}/{kind}/{name}".encode())
    (tmp_path / ".cache" / "e").mkdir(parents=True)
    return tmp_path


def test_classes_are_folders(folders: pathlib.Path) -> None:
    records = FolderRecords(folders, "train", skip=True)
    assert records.num_classes == 4
    contents = ["a/1.jpeg", "a/10.jpg", "a/2.JPEG", "c/x.PNG", "c/y.JPG"]
    assert records.read(range(5)) == [
        Record(f"train/{name}".encode(), label) for name, label in zip(contents, (0, 0, 0, 2, 2))
    ]
    assert records.name(4) == str(folders / "train" / "c" / "y.JPG")
    assert records.notes == (
        f"{folders / 'train'} has no picture of 2 of 4 classes: b, d; the other classes keep their "
        "labels",
        f"{folders / 'train'}: skipped 1 file(s) that are not JPEG, PNG, WebP or BMP: 1 .txt",
    )
    assert records.faults == records.notes[:1]
    # A class that this split lacks moves no label.
    assert [record.label for record in FolderRecords(folders, "val", skip=True).read([0, 1])] == [
        0,
        3,
    ]


def test_splits_in_tfds_syntax(folders: pathlib.Path) -> None:
    records = FolderRecords(folders, "train[3:]+val[:50%]", skip=True)
    assert [record.content for record in records.read(range(len(records)))] == [
        b"train/c/x.PNG",
        b"train/c/y.JPG",
        b"val/a/1.jpg",
    ]


def write_list(folder: pathlib.Path, text: str) -> pathlib.Path:
    (folder / "labels.tsv").write_text(text)
    return folder


def test_list(tmp_path: pathlib.Path) -> None:
    (tmp_path / "b").write_bytes(b"B")
    write_list(tmp_path, "name\tlabel\tfile\nbee\t7\tb\n\nsea\t3\tc\n")
    records = FolderRecords(tmp_path, "train")
    assert records.num_classes == 8 and records.notes == ()
    assert records.read([1, 0]) == [Record(b"", 3, "No such file or directory"), Record(b"B", 7)]
    assert FolderRecords(tmp_path, "train[1:]", num_classes=10).num_classes == 10


def test_list_with_splits_and_labels_out_of_range(tmp_path: pathlib.Path) -> None:
    lines = ["file\tsplit\tlabel", "a\ttrain\t0", "b\tval\t2", "c\ttrain\t3", "d\ttrain\t-1"]
    write_list(tmp_path, "\n".join([*lines, "e\ttrain\tcat", "f\ttrain\t1"]))
    records = FolderRecords(tmp_path, "train", num_classes=3, skip=True)
    assert [records.name(index) for index in range(2)] == [str(tmp_path / name) for name in "af"]
    told = "3 labels out of the range 0 to 2: c has '3', d has '-1', e has 'cat'"
    assert told in records.notes[0] and "these examples are left out" in records.notes[0]
    with pytest.raises(UserError, match=f"{told}; mend that, or .*on_bad_record='skip'"):
        FolderRecords(tmp_path, "train", num_classes=3)


@pytest.fixture
def beside(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder set with a file in `in`, and beside it a folder of which nothing may be read."""
    (tmp_path / "set" / "in").mkdir(parents=True)
    (tmp_path / "set" / "in" / "a.jpg").write_bytes(b"A")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "s.jpg").write_bytes(b"S")
    (tmp_path / "settings.jpg").write_bytes(b"T")
    return tmp_path / "set"


@pytest.mark.parametrize(
    "name",
    [
        "../secret/s.jpg",
        "in/../../secret/s.jpg",
        "{parent}/secret/s.jpg",
        "../settings.jpg",
        "linked/s.jpg",
        "a\0b.jpg",
        "a\0b/c.jpg",
    ],
)
def test_list_names_files_of_its_folder_alone(beside: pathlib.Path, name: str) -> None:
    (beside / "linked").symlink_to(beside.parent / "secret")
    name = name.format(parent=beside.parent)
    write_list(beside, f"file\tlabel\nin/a.jpg\t0\n{name}\t1\n")
    told = re.escape(f"names 1 files that do not lie in {beside}: {name!r}")
    with pytest.raises(UserError, match=f"{told}; mend that, or .*on_bad_record='skip'"):
        FolderRecords(beside, "train")
    records = FolderRecords(beside, "train", skip=True)
    assert records.read(range(len(records))) == [Record(b"A", 0)]
    assert re.search(f"{told}; these examples are left out", records.notes[0])


def test_list_with_links(beside: pathlib.Path) -> None:
    (beside / "out.jpg").symlink_to("../secret/s.jpg")
    (beside / "inner.jpg").symlink_to("in/a.jpg")
    (beside / "again").symlink_to("in")
    names = ["out.jpg", "inner.jpg", "again/a.jpg", "in/../in/a.jpg", f"{beside}/in/a.jpg"]
    write_list(beside, "file\tlabel\n" + "".join(f"{name}\t0\n" for name in names))
    for root in (beside, beside.parent / "by_link"):
        if not root.exists():
            root.symlink_to(beside)  # the folder itself may be a link
        first, *others = FolderRecords(root, "train").read(range(5))
        assert first == Record(b"", 0, "it is a link to a file outside of the folder")
        assert others == [Record(b"A", 0)] * 4


def test_folders_of_links(beside: pathlib.Path) -> None:
    """Without a list whoever made the links made the set."""
    (beside / "train" / "a").mkdir(parents=True)
    (beside / "train" / "a" / "1.jpg").symlink_to(beside.parent / "secret" / "s.jpg")
    assert FolderRecords(beside, "train").read([0]) == [Record(b"S", 0)]


@pytest.mark.parametrize(
    "split, message",
    [
        ("train", "train has no picture of 2 of 4 classes: b, d; mend that, or go on without"),
        (
            "test",
            r"has no folder 'test' for the split 'test'; it has train, val, and no labels.tsv",
        ),
        ("train[:x]", "train.* split 'train\\[:x\\]' is not one|has no picture"),
    ],
)
def test_mistakes_about_folders(folders: pathlib.Path, split: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FolderRecords(folders, split)


def test_numbers_of_classes(folders: pathlib.Path) -> None:
    assert FolderRecords(folders, "val", num_classes=9, skip=True).num_classes == 9
    with pytest.raises(UserError, match="num_classes is 3, .* has folders of 4 classes"):
        FolderRecords(folders, "val", num_classes=3, skip=True)


@pytest.mark.parametrize(
    "text, message",
    [
        ("file\tclass\na\t1", "no column 'label' in its first line, which has file, class"),
        ("", "no column 'file' in its first line, which has none"),
        ("file\tlabel\na\t1\nb\n", "line 3, has 1 columns, the first has 2"),
        ("file\tlabel\tsplit\na\t1\tall\n", "has a split called 'all', which in TFDS syntax means"),
        ("file\tlabel\n", "split 'train'"),
    ],
)
def test_mistakes_about_lists(tmp_path: pathlib.Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FolderRecords(write_list(tmp_path, text), "train")


def test_other_mistakes(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="config.data.dir=.*nowhere is no folder"):
        FolderRecords(tmp_path / "nowhere", "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="has no folders of classes in train"):
        FolderRecords(tmp_path, "train")
    with pytest.raises(UserError, match="config.data.dir is missing; for image_folder it is the"):
        data.load("image_folder", "train")


def test_loaded_by_name(tmp_path: pathlib.Path) -> None:
    for name, seed in (("cat", 1), ("dog", 2)):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "1.JPEG").write_bytes(encode(smooth(48, 64, seed)))
    (tmp_path / "train" / "dog" / "2.JPEG").write_bytes(b"")
    options = {"size": 32, "on_bad_record": "error"}
    source = data.load("image_folder", "train", source_dir=str(tmp_path), options=options)
    assert (source.name, source.num_classes, len(source)) == ("image_folder:train", 2, 3)
    assert source.element_spec["image"].shape == (32, 32, 3) and not source.in_memory
    assert source.gather(np.array([1, 0]))["label"].tolist() == [1, 0]
    with pytest.raises(UserError, match="dog/2.JPEG is bad: the file is empty; mend or remove it"):
        source.gather(np.arange(3))
    seeds = [
        data.load(
            "image_folder",
            "train[:2]",
            source_dir=str(tmp_path),
            options=options,
            seed=seed,
            training=training,
        ).gather(np.arange(2))["image"]
        for seed, training in ((1, True), (2, True), (1, False), (2, False))
    ]
    assert (seeds[0] != seeds[1]).any()
    np.testing.assert_array_equal(seeds[2], seeds[3])


def test_photographs() -> None:
    folder = shared("data", "imagenet_sample")
    options = {"size": 64, "num_classes": 1000}
    source = data.load(
        "image_folder", "train", source_dir=str(folder), options=options, training=False
    )
    assert len(source) == 400 and source.num_classes == 1000
    batch = source.gather(np.array([399, 0, 1]))
    assert batch["label"].tolist() == [997, 0, 2]
    whole = decode((folder / "n01440764_tench.JPEG").read_bytes())
    centre = Image.fromarray(whole).crop((86, 24, 86 + 328, 24 + 328))  # of 500 by 375 pixels
    expected = np.asarray(centre.resize((64, 64), Image.Resampling.BOX)).astype(int)
    assert np.abs(batch["image"][1] - expected).mean() < 6


def test_a_list_with_a_byte_order_mark(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_bytes(b"A")
    (tmp_path / "labels.tsv").write_bytes("\ufefffile\tlabel\r\na\t1\r\n".encode())
    assert FolderRecords(tmp_path, "train").read([0]) == [Record(b"A", 1)]


def test_every_format_by_its_content(tmp_path: pathlib.Path) -> None:
    """Also under the name of another format, in training and in evaluation."""
    pixels = np.full((40, 40, 3), (200, 30, 90), np.uint8)
    names = {
        "1.jfif": "rgb",
        "2.JPE": "rgb",
        "3.WebP": "webp",
        "4.bmp": "bmp",
        "5.DIB": "bmp",
        "6.jpg": "png",
        "7.png": "webp",
        "8.webp": "rgb",
        "9.orig": "rgb",
        "without": "bmp",
    }
    for name, kind in names.items():
        (tmp_path / "train" / "ab"[len(name) % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "ab"[len(name) % 2] / name).write_bytes(encode(pixels, kind))
    for training in (True, False):
        source = data.load(
            "image_folder",
            "train",
            source_dir=str(tmp_path),
            options={"size": 32},
            training=training,
        )
        assert len(source) == len(names) and source.notes == ()
        images = source.gather(np.arange(len(source)))["image"]
        assert np.abs(images.astype(int) - pixels[0, 0]).max() <= 4
        assert source.tally.counts() == {"png": 1, "webp": 2, "bmp": 3}


def test_rotation_tags_are_noted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(10):
            (tmp_path / "train" / name / f"{index}.jpg").write_bytes(
                encode(smooth(20, 30), exif=exif if index < 4 else Image.Exif())
            )
    tag = "have an EXIF rotation tag, which is ignored"
    (note,) = FolderRecords(tmp_path, "train").notes
    assert note.startswith(f"{tmp_path}: 8 of 20 images {tag}")
    monkeypatch.setattr("lamb_tpu.data.images.folder._LOOKED_AT", 4)
    (note,) = FolderRecords(tmp_path, "train").notes
    assert note.startswith(f"{tmp_path}: 2 of 4 images (of 20) that were looked at {tag}")
