"""Reading of regular files, and errors for folders, pipes, devices and invalid content."""

import contextlib
import os
import pathlib
import socket

import pytest

from lamb_tpu.files import reading

DEEP = "[" * 200_000 + "]" * 200_000


def test_types(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    actual = {
        name: reading.kind(tmp_path / name)
        for name in ("file", "link", "nowhere", "pipe", ".", "none", "file/below")
    }
    assert actual == {
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
        # Too deep for recursive code, though Python's parser reads it.
        (b"[" * 900 + b"]" * 900, "it is nested too deeply, more than 100 levels"),
        (b'{"a": "\0"}', "line 1 has a NUL byte, so the file is not text"),
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
    # A byte-order mark alone is an empty text; UTF-16 is rejected.
    file.write_bytes("\ufeff".encode())
    assert reading.read_text(file) == ""
    file.write_bytes("[1]".encode("utf-16"))
    with pytest.raises(ValueError, match="line 1 is not UTF-8"):
        reading.read_text(file)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"a\r\nb\r\n\xff\r\n", r"line 3 is not UTF-8 \(byte 0xff: invalid start byte\)"),
        # The decoder's byte count begins after the byte-order mark.
        (
            b"\xef\xbb\xbfa\nb\xe9 c\n",
            r"line 2 is not UTF-8 \(byte 0xe9: invalid continuation byte\)",
        ),
        (b"a\n\0b", "line 2 has a NUL byte"),
    ],
)
def test_encoding_error_names_the_line(tmp_path: pathlib.Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        reading.read_text(tmp_path / "x")


def test_a_file_above_the_limit_is_not_read(tmp_path: pathlib.Path) -> None:
    # A sparse file: reading it would need 2 TiB.
    with (tmp_path / "x").open("wb") as file:
        file.truncate(2**41)
    for read, size in ((reading.read_text, "1,024"), (reading.read_json, "64")):
        with pytest.raises(ValueError, match=f"^it has more than {size} MiB, which is the size"):
            read(tmp_path / "x")
    # Files of /proc report the size 0.
    with pytest.raises(ValueError, match="it has more than"):
        reading.read_bytes("/proc/self/status", max_bytes=10)
    assert reading.read_bytes("/proc/self/stat").startswith(str(os.getpid()).encode())


def test_pipes_and_devices_are_rejected_without_waiting(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    # A path longer than 107 characters is too long for a socket.
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):
        server.bind("socket")
        for name, reason in {
            "pipe": "it is a pipe, not a file",
            "link": "it is a pipe, not a file",
            "zero": "it is a device, not a file",
            "socket": "it is a socket, not a file",
            ".": "it is a folder, not a file",
            "loop": "symbolic link",
            "n" * 300: "File name too long",
        }.items():
            for read in (reading.read_text, reading.read_bytes, reading.open_file):
                with pytest.raises(ValueError, match=reason):
                    read(name)
    # Invalid file names.
    for name in ("a\0b", "a\ud800b", "none"):
        with pytest.raises(FileNotFoundError):
            reading.read_text(tmp_path / name)


def test_a_file_that_becomes_a_pipe_is_rejected_without_waiting(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(reading, "kind", lambda path: "a file")
    with pytest.raises(ValueError, match="it is a pipe"):
        reading.read_text(tmp_path / "pipe")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("a = " + DEEP, "it is nested too deep"),
        (".".join("a" * 3000) + " = 1", "it is nested too deep"),
        ("a = ", "Invalid value"),
        ("a = " + "1" * 5000, "4300 digits"),
    ],
)
def test_toml_that_cannot_be_read(tmp_path: pathlib.Path, text: str, reason: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ValueError, match=reason):
        reading.read_toml(tmp_path / "x.toml")


def test_toml_that_can(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.toml").write_bytes('\ufeff[a]\r\nb = ["é"]\r\n'.encode())
    assert reading.read_toml(tmp_path / "x.toml") == {"a": {"b": ["é"]}}


@pytest.mark.parametrize(
    "path, expected",
    [("/a/b.c-d_e", False), ("/a[1]/b", True), ("/a]", True), ("/a*", True), ("/a?", True)],
)
def test_patterns(path: str, expected: bool) -> None:
    assert reading.has_pattern(pathlib.Path(path)) == expected
