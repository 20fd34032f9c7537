"""Files of any kind at the paths that users give."""

import os
import pathlib

import pytest

from lamb_tpu.files import reading

DEEP = "[" * 200_000 + "]" * 200_000


def test_kinds(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    found = {
        name: reading.kind(tmp_path / name)
        for name in ("file", "link", "nowhere", "pipe", ".", "none", "file/below")
    }
    assert found == {
        "file": "a file",
        "link": "a file",
        "nowhere": None,
        "pipe": "a pipe",
        ".": "a folder",
        "none": None,
        "file/below": None,
    }
    assert reading.kind("/dev/null") == "a device"
    with pytest.raises(OSError):
        reading.kind(tmp_path / "loop")


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "it is a folder, not a file"),
        (b"\xff", "invalid start byte"),
        (b"", "Expecting value"),
        (b"[1", "delimiter"),
        (DEEP.encode(), "it is nested too deep"),
        (b"1" * 5000, "4300 digits"),
    ],
)
def test_json_that_cannot_be_read(tmp_path: pathlib.Path, content: bytes, reason: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content) if content is not None else file.mkdir()
    with pytest.raises(ValueError, match=reason):
        reading.read_json(file)


def test_json_that_can(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.json"
    with pytest.raises(FileNotFoundError) as error:
        reading.read_json(file)
    assert error.value.strerror == "No such file or directory"
    file.write_text('{"a": ["é"]}', encoding="utf-8")
    assert reading.read_json(file) == {"a": ["é"]}
    file.write_bytes(b"a\xff")
    assert reading.read_text(file, errors="replace") == "a\ufffd"


def test_a_byte_order_mark_is_stripped(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes('\ufeff{"a": "\ufeffb"}'.encode())
    assert reading.read_json(file) == {"a": "\ufeffb"}
    assert reading.read_text(file, errors="replace").startswith("{")
    # The mark alone is an empty text, and other encodings are not UTF-8.
    file.write_bytes("\ufeff".encode())
    assert reading.read_text(file) == ""
    file.write_bytes("[1]".encode("utf-16"))
    with pytest.raises(ValueError, match="utf-8"):
        reading.read_text(file)


@pytest.mark.parametrize(
    "path, expected",
    [("/a/b.c-d_e", False), ("/a[1]/b", True), ("/a]", True), ("/a*", True), ("/a?", True)],
)
def test_patterns(path: str, expected: bool) -> None:
    assert reading.has_pattern(pathlib.Path(path)) == expected
