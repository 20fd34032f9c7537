"""The command that looks through a set of photographs."""

import pathlib

import pytest
from PIL import Image

from lamb_tpu.data.images.check import main
from tests import tiny
from tests.data.images.pictures import claiming, encode, smooth


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Forty good pictures of a and b, one of them grey."""
    for index in range(40):
        path = tmp_path / "train" / "ab"[index % 2] / f"{index:02d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(smooth(20, 30, index), "grey" if index == 3 else "rgb"))
    return tmp_path


def test_all_is_well(folder: pathlib.Path) -> None:
    done = tiny.command("lamb_tpu.data.images.check", f"--dir={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "40 pictures of 2 classes: 39 in colour, 1 grey\n"


def test_what_is_wrong_is_named(folder: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    train = folder / "train"
    whole = (train / "b" / "05.JPEG").read_bytes()
    middle = len(whole) * 2 // 3
    (train / "b" / "05.JPEG").write_bytes(whole[:middle] + bytes(range(60)) + whole[middle + 60 :])
    (train / "a" / "10.JPEG").write_bytes(b"")
    (train / "a" / "12.JPEG").write_bytes(encode(smooth(20, 30), "png"))
    (train / "b" / "39.JPEG").write_bytes(encode(smooth(20, 30), "cmyk"))
    (train / "c").mkdir()
    assert main([f"--dir={folder}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"bad\t{train} has no picture of 1 of 3 classes: c")
    assert lines[1:3] == [f"bad\t{train}/a/10.JPEG\tthe file is empty", f"png\t{train}/a/12.JPEG"]
    assert lines[3].startswith(f"bad\t{train}/b/05.JPEG\tCorrupt JPEG data")
    assert lines[4:] == [
        f"cmyk\t{train}/b/39.JPEG",
        "40 pictures of 3 classes: 35 in colour, 1 grey, 1 CMYK, 1 PNG, 2 bad",
    ]


def test_what_is_not_read_as_expected_is_noted(
    folder: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "train" / "a" / "00.JPEG").write_bytes(encode(smooth(20, 30), exif=exif))
    (folder / "train" / "a" / "deep").mkdir()
    (folder / "train" / "a" / "deep" / "x.webp").write_bytes(encode(smooth(20, 30), "webp"))
    (folder / "train" / "b" / "y.dat").write_bytes(encode(smooth(20, 30), "bmp"))
    (folder / "train" / "b" / "z.tif").write_bytes(b"II*\0")
    assert main([f"--dir={folder}"]) == 0
    train = folder / "train"
    assert capsys.readouterr().out.splitlines() == [
        f"note\t{train}: skipped 1 file(s) that are not JPEG, PNG, WebP or BMP: 1 .tif",
        f"note\t{train}: 1 image(s) lie deeper than in the folder of their class, such as "
        f"a/deep/x.webp; each belongs to the class of the first folder in {train}",
        f"note\t{folder}: 1 of 42 images have an EXIF rotation tag, which is ignored: the stored "
        "rows are read as they are",
        f"rotated\t{train}/a/00.JPEG",
        f"webp\t{train}/a/deep/x.webp",
        f"bmp\t{train}/b/y.dat",
        "42 pictures of 2 classes: 39 in colour, 1 grey, 1 WebP, 1 BMP; 1 with an EXIF rotation "
        "tag (which is ignored)",
    ]


def test_limit_of_pixels(folder: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "train" / "a" / "10.JPEG").write_bytes(claiming("rgb", 65_500, 65_500))
    assert main([f"--dir={folder}"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"bad\t{folder}/train/a/10.JPEG\tit claims 65,500 x 65,500 pixels, more")
    assert main([f"--dir={folder}", "--max-megapixels=0.0005"]) == 1
    assert capsys.readouterr().out.endswith("2 classes: 40 bad\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dir=nowhere"], "error: config.data.dir=nowhere is no folder"),
        (["--name=digits"], "error: config.data.options.on_bad_record is unknown; digits has none"),
        (
            ["--dir=.", "--max-megapixels=0"],
            "error: config.data.options.max_megapixels must be a numb",
        ),
        (["--nam=digits"], "error: unrecognized arguments: --nam=digits; see --help"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(message)
