"""Files of any kind, and an output that nobody takes."""

import os
import pathlib
import subprocess
import sys

import pytest

from lamb_tpu import filesystem
from lamb_tpu.errors import UserError
from tests import tiny

DEEP = "[" * 200_000 + "]" * 200_000


def test_kinds(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    found = {name: filesystem.kind(tmp_path / name) for name in (
        "file", "link", "nowhere", "pipe", ".", "none", "file/below",
    )}
    assert found == {
        "file": "a file", "link": "a file", "nowhere": None, "pipe": "a pipe", ".": "a folder",
        "none": None, "file/below": None,
    }
    assert filesystem.kind("/dev/null") == "a device"
    with pytest.raises(OSError):
        filesystem.kind(tmp_path / "loop")


@pytest.mark.parametrize("content, reason", [
    (None, "it is a folder, not a file"),
    (b"\xff", "invalid start byte"),
    (b"", "Expecting value"),
    (b"[1", "delimiter"),
    (DEEP.encode(), "it is nested too deep"),
    (b"1" * 5000, "4300 digits"),
])
def test_json_that_cannot_be_read(tmp_path: pathlib.Path, content: bytes, reason: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content) if content is not None else file.mkdir()
    with pytest.raises(ValueError, match=reason):
        filesystem.read_json(file)


def test_json_that_can(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.json"
    with pytest.raises(FileNotFoundError) as error:
        filesystem.read_json(file)
    assert error.value.strerror == "No such file or directory"
    file.write_text('{"a": ["é"]}', encoding="utf-8")
    assert filesystem.read_json(file) == {"a": ["é"]}
    file.write_bytes(b"a\xff")
    assert filesystem.read_text(file, errors="replace") == "a\ufffd"


def test_writing_names_flag_and_reason(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError) as error, filesystem.writing("--out", tmp_path):
        tmp_path.write_text("x")
    assert str(error.value) == f"--out {tmp_path} cannot be written (Is a directory); give another"
    with pytest.raises(ZeroDivisionError), filesystem.writing("--out", tmp_path):
        1 / 0


@pytest.mark.parametrize("body, status, told", [
    ("print('x'); return 0", 2, "error: standard output cannot be written (No space left on d"),
    ("print('x', flush=True)", 2, "error: standard output cannot be written (No space left on d"),
    ("return 1", 1, ""),
    ("return 0", 0, ""),
    ("open('/nowhere/x')", 1, "Traceback"),
])
def test_full_output(body: str, status: int, told: str) -> None:
    code = (
        "from lamb_tpu import filesystem\n"
        f"def main():\n    {body}\n"
        "filesystem.run_and_exit(main)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tiny.ROOT, stdout=full, stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == status and done.stderr.startswith(told), done.stderr
    assert bool(told) == bool(done.stderr) and "ignored" not in done.stderr


def test_reader_that_has_seen_enough() -> None:
    code = (
        "from lamb_tpu import filesystem\n"
        "filesystem.run_and_exit(lambda: print('line\\n' * 100_000))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tiny.ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141
