"""Files of a run on disks that fail; a folder that is replaced stands for one that was lost."""

import errno
import os
import pathlib
from collections.abc import Callable

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import writing

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raises(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    "error, expected",
    [
        (FULL, "No space left on device"),
        (
            ValueError(
                "RESOURCE_EXHAUSTED: write: [OS error 28: ENOSPC No space left on device] [a='b']"
            ),
            "No space left on device",
        ),
        (RuntimeError("OSError: [Errno 30] Read-only file system: '/a'"), "Read-only file system"),
        (ValueError("what\nnobody knows"), "ValueError: what nobody knows"),
        (ValueError("x" * 999), "ValueError: " + "x" * 200),
    ],
)
def test_reason_is_short(error: BaseException, expected: str) -> None:
    assert writing.reason(error) == expected


def test_failed_write_is_a_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="^/a/b cannot be written .No space left on device.; free"):
        with writing.checked(pathlib.Path("/a/b")):
            raise FULL
    with pytest.raises(UserError, match=f"^{tmp_path} cannot be written .Is a directory.; "):
        writing.LineFile(tmp_path)


def test_writing_names_flag_and_reason(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError) as error, writing.checked(tmp_path, "--out"):
        tmp_path.write_text("x")
    assert str(error.value) == f"--out {tmp_path} cannot be written (Is a directory); give another"
    with pytest.raises(ZeroDivisionError), writing.checked(tmp_path, "--out"):
        1 / 0


def test_file_is_replaced_whole_or_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    for text in ("old", "new ä"):
        writing.replace(path, text)
        assert path.read_text("utf-8") == text
    monkeypatch.setattr(pathlib.Path, "replace", raises(FULL))
    with pytest.raises(UserError, match="cannot be written .No space"):
        writing.replace(path, "newest")
    assert path.read_text("utf-8") == "new ä" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_what_a_save_does_is_tried(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    writing.try_out(tmp_path)
    assert not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        writing.try_out(tmp_path / "none")
    monkeypatch.setattr(os if call == "fsync" else pathlib.Path, call, raises(FULL))
    with pytest.raises(OSError, match="No space"):
        writing.try_out(tmp_path)
    assert not os.listdir(tmp_path)


def test_lines_are_there_at_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"
    path.write_text("before\n")
    lines = writing.LineFile(path)
    lines.write("a")
    assert path.read_text() == "before\na\n"
    lines.close()
    lines.close()
    lines.write("too late")
    assert path.read_text() == "before\na\n"


@pytest.mark.parametrize(
    "lose",
    [
        pathlib.Path.unlink,
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: (path.rename(path.with_name("elsewhere")), path.write_text("another")),
    ],
)
def test_file_that_was_lost_is_noticed(
    tmp_path: pathlib.Path, lose: Callable[[pathlib.Path], object]
) -> None:
    path, told = tmp_path / "lines", []
    lines, strict = writing.LineFile(path, told.append), writing.LineFile(path)
    lines.write("a")
    lose(path)
    for _ in range(2):
        lines.write("b")
    (error,) = told  # once only
    assert str(error).startswith(f"{path} was moved, replaced or deleted while the run wrote it")
    with pytest.raises(UserError, match="moved, replaced or deleted"):
        strict.write("c")


def test_full_disk_is_told_once() -> None:
    told: list[UserError] = []
    lines = writing.LineFile(pathlib.Path("/dev/full"), told.append)
    for _ in range(3):
        lines.write("a")
    (error,) = told
    assert str(error).startswith("/dev/full cannot be written (No space left on device); free")
