"""Plain folders of images, with a folder for each class or with a list of labels."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lamb_tpu import data
from lamb_tpu.data.images.folder import FolderRecords
from lamb_tpu.data.images.records import Record
from lamb_tpu.data.images.source import ImageSource
from tests.data.images.photographs import ROTATED, decode, encode, smooth, write
from tests.raising import rejected
from tests.shared import shared


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> pathlib.Path:
    """The split train has 3 images of class a, 0 of b and 2 of c; val has 1 of a and 1 of d."""
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
        f"{folders / 'train'} has no image of 2 of 4 classes: b, d; the other classes keep their "
        "labels",
        f"{folders / 'train'}: skipped 1 file(s) that are not JPEG, PNG, WebP or BMP: 1 .txt",
    )
    assert records.faults == records.notes[:1]
    # A class that a split lacks does not shift the labels.
    held_out = FolderRecords(folders, "val", skip=True).read([0, 1])
    assert [record.label for record in held_out] == [0, 3]


def test_splits_in_tfds_syntax(folders: pathlib.Path) -> None:
    records = FolderRecords(folders, "train[3:]+val[:50%]", skip=True)
    contents = [record.content for record in records.read(range(len(records)))]
    assert contents == [b"train/c/x.PNG", b"train/c/y.JPG", b"val/a/1.jpg"]


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
    output = "3 label(s) that are not in the range 0 to 2: c has '3', d has '-1', e has 'cat'"
    assert output in records.notes[0] and "these examples are left out" in records.notes[0]
    with rejected(
        "*has 3 label(s) that are not in the range 0 to 2", ..., ": c has '3', d has '-1', e"
    ):
        FolderRecords(tmp_path, "train", num_classes=3)


@pytest.fixture
def beside(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a set, next to files that must not be read."""
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
    key = f"*labels.tsv names 1 file(s) that are not in {beside}"
    with rejected(key, ..., f": {name!r}", "on_bad_record='skip'"):
        FolderRecords(beside, "train")
    records = FolderRecords(beside, "train", skip=True)
    assert records.read(range(len(records))) == [Record(b"A", 0)]
    assert f"{key.removeprefix('*')}: {name!r}; these examples are left out" in records.notes[0]


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
        assert first == Record(b"", 0, "it is a link to a file outside the folder")
        assert others == [Record(b"A", 0)] * 4


def test_folders_of_links(beside: pathlib.Path) -> None:
    """Without a list, links are trusted: their author also made the set."""
    (beside / "train" / "a").mkdir(parents=True)
    (beside / "train" / "a" / "1.jpg").symlink_to(beside.parent / "secret" / "s.jpg")
    assert FolderRecords(beside, "train").read([0]) == [Record(b"S", 0)]


@pytest.mark.parametrize(
    "split, message",
    [
        ("train", ("*/train has no image of 2 of 4 classes", ..., ": b, d")),
        ("test", ("*", ..., "has no folder 'test' for the split", "are DIR/SPLIT/CLASS/... and")),
        ("train[:x]", ("*/train has no image of 2 of 4 classes", ..., ": b, d")),
    ],
)
def test_folder_errors(folders: pathlib.Path, split: str, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        FolderRecords(folders, split)


def test_numbers_of_classes(folders: pathlib.Path) -> None:
    assert FolderRecords(folders, "val", num_classes=9, skip=True).num_classes == 9
    with rejected("config.data.options.num_classes", 3, "is less than the 4 class folders in"):
        FolderRecords(folders, "val", num_classes=3, skip=True)


@pytest.mark.parametrize(
    "text, message",
    [
        ("file\tclass\na\t1", ("*/labels.tsv", ..., "no column 'label' in its first", "add this")),
        ("", ("*/labels.tsv", ..., "has no column 'file' in its first line,")),
        ("file\tlabel\na\t1\nb\n", ("*/labels.tsv, line 3,", ..., "has 1 columns, but the first")),
        ("file\tlabel\tsplit\na\t1\tall\n", ("*", ..., "has a split called 'all'", "rename the")),
        ("file\tlabel\n", ("*", ..., "is not valid (Unknown split 'train'. Should be one of [].)")),
    ],
)
def test_list_errors(tmp_path: pathlib.Path, text: str, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        FolderRecords(write_list(tmp_path, text), "train")


def test_other_errors(tmp_path: pathlib.Path) -> None:
    with rejected("config.data.dir", ..., "is not a folder", "give a folder of images"):
        FolderRecords(tmp_path / "nowhere", "train")
    (tmp_path / "train").mkdir()
    with rejected("*", ..., "has no class folders in train"):
        FolderRecords(tmp_path, "train")
    with rejected("config.data.dir", ..., "is missing", "give a folder DIR with images in"):
        data.load("image_folder", "train")


def test_loaded_by_name(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "train/cat/1.JPEG", "train/dog/1.JPEG", height=48, width=64)
    (tmp_path / "train" / "dog" / "2.JPEG").write_bytes(b"")
    options = {"size": 32, "on_bad_record": "error"}
    source = data.load("image_folder", "train", source_dir=str(tmp_path), options=options)
    assert (source.name, source.num_classes, len(source)) == ("image_folder:train", 2, 3)
    assert source.element_spec["image"].shape == (32, 32, 3) and not source.in_memory
    assert source.gather(np.array([1, 0]))["label"].tolist() == [1, 0]
    with rejected("*/2.JPEG of data set image_folder:train", ..., "is bad: the file is empty"):
        source.gather(np.arange(3))
    named = {"source_dir": str(tmp_path), "options": options}
    seeds = [
        data.load("image_folder", "train[:2]", seed=seed, training=training, **named)
        for seed, training in ((1, True), (2, True), (1, False), (2, False))
    ]
    seeds = [each.gather(np.arange(2))["image"] for each in seeds]
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
    decoded = decode((folder / "n01440764_tench.JPEG").read_bytes())
    centre = Image.fromarray(decoded).crop((86, 24, 86 + 328, 24 + 328))  # of 500 by 375 pixels
    expected = np.asarray(centre.resize((64, 64), Image.Resampling.BOX)).astype(int)
    assert np.abs(batch["image"][1] - expected).mean() < 6


def test_a_list_with_a_byte_order_mark(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_bytes(b"A")
    (tmp_path / "labels.tsv").write_bytes("\ufefffile\tlabel\r\na\t1\r\n".encode())
    assert FolderRecords(tmp_path, "train").read([0]) == [Record(b"A", 1)]


def test_a_list_of_names_in_odd_encodings(tmp_path: pathlib.Path) -> None:
    # One name is not UTF-8; two have characters that end a line for Python's splitlines only.
    names = [b"a\xff.jpg", "b\u2028c.jpg".encode(), b"d\x0be.jpg"]
    for name in names:
        pathlib.Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_bytes(name)
    rows = b"".join(name + b"\t0\n" for name in names)
    (tmp_path / "labels.tsv").write_bytes(b"file\tlabel\n" + rows)
    records = FolderRecords(tmp_path, "train")
    assert [record.content for record in records.read(range(3))] == names


def test_pipe_or_device_is_a_bad_record(folders: pathlib.Path) -> None:
    """Reading a pipe would block for ever, and reading a device would never end."""
    os.mkfifo(folders / "train" / "a" / "3.jpg")
    (folders / "train" / "a" / "4.jpg").symlink_to("/dev/zero")
    (folders / "train" / "a" / "5.jpg").symlink_to("3.jpg")
    (folders / "train" / "a" / "6.jpg").symlink_to("/dev/full")
    with (folders / "train" / "a" / "7.jpg").open("wb") as file:
        file.truncate(2**41)
    os.mkfifo(folders / "train" / "a" / "pipe")
    options = {"on_bad_record": "skip"}
    source = data.load("image_folder", "train", source_dir=str(folders), options=options)
    assert isinstance(source, ImageSource) and "skipped 2 file(s)" in source.notes[1]
    records = source.records
    problems = {
        records.name(index): record.problem
        for index, record in enumerate(records.read(range(len(records))))
        if record.problem
    }
    pipe, device = "it is a pipe, not a file", "it is a device, not a file"
    large = "it has more than 512 MiB, which is the size limit"
    expected = zip("34567", (pipe, device, pipe, device, large))
    assert problems == {f"{folders}/train/a/{name}.jpg": problem for name, problem in expected}


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), pathlib.Path.mkdir]
)
def test_a_list_that_is_not_a_file(tmp_path: pathlib.Path, make: Callable[..., None]) -> None:
    make(tmp_path / "labels.tsv")
    with rejected("*/labels.tsv", ..., "cannot be read (it is a "):
        FolderRecords(tmp_path, "train")


def test_every_format_by_its_content(tmp_path: pathlib.Path) -> None:
    """Training and evaluation decode images even if their suffix names another format."""
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
    named = {"source_dir": str(tmp_path), "options": {"size": 32}}
    for training in (True, False):
        source = data.load("image_folder", "train", training=training, **named)
        assert len(source) == len(names) and source.notes == ()
        images = source.gather(np.arange(len(source)))["image"]
        assert np.abs(images.astype(int) - pixels[0, 0]).max() <= 4
        assert source.tally.counts() == {"png": 1, "webp": 2, "bmp": 3}


def test_rotation_tags_are_noted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(10):
            (tmp_path / "train" / name / f"{index}.jpg").write_bytes(
                encode(smooth(20, 30), exif=ROTATED if index < 4 else Image.Exif())
            )
    tag = "have an EXIF rotation tag, which is ignored"
    (note,) = FolderRecords(tmp_path, "train").notes
    assert note.startswith(f"{tmp_path}: 8 of 20 images {tag}")
    monkeypatch.setattr("lamb_tpu.data.images.folder._SAMPLED", 4)
    (note,) = FolderRecords(tmp_path, "train").notes
    assert note.startswith(f"{tmp_path}: 2 of 4 images sampled from 20 {tag}")
