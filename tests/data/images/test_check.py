"""The command that checks a set of photographs."""

import os
import pathlib
import re

import pytest

from lamb_tpu.data.images.check import main
from tests import tiny
from tests.data.images.photographs import ROTATED, claiming, encode, smooth


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Forty valid images of the classes a and b; one image is grey."""
    for index in range(40):
        path = tmp_path / "train" / "ab"[index % 2] / f"{index:02d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(smooth(20, 30, index), "grey" if index == 3 else "rgb"))
    return tmp_path


def test_all_is_well(folder: pathlib.Path) -> None:
    done = tiny.command("lamb_tpu.data.images.check", f"--dir={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "40 images of 2 classes: 39 in colour, 1 grey\n"


def test_bad_images_are_named(folder: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    train = folder / "train"
    full = (train / "b" / "05.JPEG").read_bytes()
    middle = len(full) * 2 // 3
    (train / "b" / "05.JPEG").write_bytes(full[:middle] + bytes(range(60)) + full[middle + 60 :])
    (train / "a" / "10.JPEG").write_bytes(b"")
    (train / "a" / "12.JPEG").write_bytes(encode(smooth(20, 30), "png"))
    (train / "b" / "39.JPEG").write_bytes(encode(smooth(20, 30), "cmyk"))
    (train / "c").mkdir()
    assert main([f"--dir={folder}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"bad\t{train} has no image of 1 of 3 classes: c")
    assert lines[1:3] == [f"bad\t{train}/a/10.JPEG\tthe file is empty", f"png\t{train}/a/12.JPEG"]
    assert lines[3].startswith(f"bad\t{train}/b/05.JPEG\tCorrupt JPEG data")
    assert lines[4:] == [
        f"cmyk\t{train}/b/39.JPEG",
        "40 images of 3 classes: 35 in colour, 1 grey, 1 CMYK, 1 PNG, 2 bad",
    ]


def test_skipped_files_are_noted(folder: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "train" / "a" / "00.JPEG").write_bytes(encode(smooth(20, 30), exif=ROTATED))
    (folder / "train" / "a" / "deep").mkdir()
    (folder / "train" / "a" / "deep" / "x.webp").write_bytes(encode(smooth(20, 30), "webp"))
    (folder / "train" / "b" / "y.dat").write_bytes(encode(smooth(20, 30), "bmp"))
    (folder / "train" / "b" / "z.tif").write_bytes(b"II*\0")
    assert main([f"--dir={folder}"]) == 0
    train = folder / "train"
    assert capsys.readouterr().out.splitlines() == [
        f"note\t{train}: skipped 1 file(s) that are not JPEG, PNG, WebP or BMP: 1 .tif",
        f"note\t{train}: 1 image(s) are in subfolders of their class, such as "
        f"a/deep/x.webp; each belongs to the class of its outermost folder in {train}",
        f"note\t{folder}: 1 of 42 images have an EXIF rotation tag, which is ignored: images "
        "are not rotated",
        f"rotated\t{train}/a/00.JPEG",
        f"webp\t{train}/a/deep/x.webp",
        f"bmp\t{train}/b/y.dat",
        "42 images of 2 classes: 39 in colour, 1 grey, 1 WebP, 1 BMP; 1 with an EXIF rotation "
        "tag (which is ignored)",
    ]


def test_names_with_control_characters(folder: pathlib.Path) -> None:
    """A file name can neither forge a line of output nor control the terminal."""
    odd = "\x1b]0;owned\x07\r\x9b2J\u202eb\nbad\tforged"
    (folder / "train" / f"c{odd}").mkdir()
    for name in (f"1{odd}.jpg", "2.jpg", os.fsdecode(b"3\xff.jpg")):
        (folder / "train" / f"c{odd}" / name).write_bytes(b"")
    (folder / "train" / f"d{odd}").mkdir()
    done = tiny.command("lamb_tpu.data.images.check", f"--dir={folder}")
    assert done.returncode == 1 and not done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", done.stdout)
    safe = r"\x1b]0;owned\x07\r\x9b2J\u202eb\nbad"
    assert lines[0].startswith(f"bad\t{folder}/train has no image of 1 of 4 classes: d{safe}\tfo")
    assert [line.rpartition("\t") for line in lines[1:4]] == [
        (f"bad\t{folder}/train/c{safe}\tforged/{name}", "\t", "the file is empty")
        for name in (f"1{safe}\tforged.jpg", "2.jpg", r"3\udcff.jpg")
    ]


def test_limit_of_pixels(folder: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "train" / "a" / "10.JPEG").write_bytes(claiming("rgb", 65_500, 65_500))
    assert main([f"--dir={folder}"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"bad\t{folder}/train/a/10.JPEG\tit claims 65,500 x 65,500 pixels, whos")
    assert main([f"--dir={folder}", "--max-megapixels=0.0005"]) == 1
    assert capsys.readouterr().out.endswith("2 classes: 40 bad\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dir=nowhere"], "config.data.dir='nowhere' is not a folder"),
        (["--name=digits"], "config.data.options.on_bad_record is unknown; data set 'digits' "),
        (["--dir=.", "--max-megapixels=0"], "config.data.options.max_megapixels=0.0 is out of ra"),
        (
            ["--nam=digits"],
            "unrecognized arguments: --nam=digits; see --help; did you mean --name?",
        ),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
