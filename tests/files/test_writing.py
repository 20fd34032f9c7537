"""Writing of files: atomic replacement, checks before a write, and full disks and lost files."""

import contextlib
import errno
import os
import pathlib
import socket
import stat
from collections.abc import Callable

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from tests.raising import rejected

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
    with rejected("/a/b", ..., "cannot be written (No space left on device)"):
        with writing.checked(pathlib.Path("/a/b")):
            raise FULL
    with rejected("*", ..., "cannot be written (Is a directory)"):
        writing.LineFile(tmp_path)


def test_writing_names_flag_and_reason(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError) as error, writing.checked(tmp_path, "--out"):
        tmp_path.write_text("x")
    assert str(error.value) == (
        f"--out {tmp_path} cannot be written (Is a directory); give another path"
    )
    with pytest.raises(ZeroDivisionError), writing.checked(tmp_path, "--out"):
        1 / 0


def test_replacement_is_atomic(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for text in ("old", "new ä"):
        writing.replace(path, text)
        assert path.read_text("utf-8") == text
    monkeypatch.setattr(os, "replace", raises(FULL))
    with rejected("*/file", ..., "cannot be written (No space left on device)"):
        writing.replace(path, "newest")
    assert path.read_text("utf-8") == "new ä" and os.listdir(tmp_path) == ["file"]


def test_half_a_character_is_escaped(tmp_path: pathlib.Path) -> None:
    writing.replace(tmp_path / "page.md", "ä\ud800")
    assert (tmp_path / "page.md").read_text("utf-8") == "ä\\ud800"


def test_replace_leaves_other_files_alone(tmp_path: pathlib.Path) -> None:
    path, other = tmp_path / "out.md", tmp_path / "out.md.new"
    other.write_text("draft")
    writing.replace(path, b"page")
    assert other.read_text() == "draft"
    other.unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    other.symlink_to(victim)
    writing.replace(path, "second page")
    assert victim.read_text() == "precious" and path.read_text() == "second page"
    assert sorted(os.listdir(tmp_path)) == ["out.md", "out.md.new", "victim"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_replace_keeps_permissions(tmp_path: pathlib.Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    writing.replace(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o7777 == mode
    # A new file has the permissions that `open` gives.
    (tmp_path / "opened").touch()
    writing.replace(tmp_path / "made", "")
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "opened").stat().st_mode


def test_replace_writes_through_links(tmp_path: pathlib.Path) -> None:
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "target"
    link.symlink_to("far/target")
    for text in ("made", "replaced"):  # at first the link dangles
        assert writing.check_target(link) == link
        writing.replace(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert os.listdir(target.parent) == ["target"]
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    lost = tmp_path / "lost"
    lost.symlink_to("none/file")
    for call in (writing.check_target, lambda *values: writing.replace(values[0], "", values[1])):
        with rejected("*/loop", ..., "cannot be written (Too many levels of", "give another"):
            call(loop, "--out")
        with rejected(f"--out {lost}", ..., "cannot be written"):
            call(lost, "--out")


def test_only_files_are_replaced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, folder, device = (tmp_path / name for name in ("pipe", "folder", "device"))
    os.mkfifo(pipe)
    folder.mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        server.bind("socket")
    actual = {pipe: "a pipe", folder: "a folder", tmp_path / "socket": "a socket"}
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 7))  # /dev/full
        actual[device] = "a device"
    except OSError:
        pass  # only root can make a device
    for path, kind in actual.items():
        link = tmp_path / f"to-{path.name}"
        link.symlink_to(path)
        for each in (path, link):
            before = os.stat(each)
            expected = (f"--carry {each}", ..., f"is {kind}, not a file", "give the path of a regu")
            with rejected(*expected):
                writing.check_target(each, "--carry")
            with rejected(*expected):
                writing.replace(each, "x", "--carry")
            assert os.stat(each) == before


def test_targets_are_checked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    assert writing.check_target(str(path), "--out") == path
    path.write_text("old")
    path.chmod(0o640)
    assert writing.check_target(path) == path
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    with rejected("*/file", ..., "cannot be written, because the folder"):
        writing.check_target(tmp_path / "none" / "file", "--out")
    with rejected("*/file", ..., "cannot be written (Not a directory)", "give another"):
        writing.check_target(path / "file", "--out")
    with rejected("*xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", ..., "cannot be written (File"):
        writing.check_target(tmp_path / ("x" * 300), "--out")
    with rejected("*/a\x00b", ..., "cannot be written (embedded null byte)", "give another"):
        writing.replace(tmp_path / "a\0b", "", "--out")
    long = tmp_path / ("x" * 255)
    assert writing.check_target(long) == long
    writing.replace(long, "")
    long.unlink()
    monkeypatch.setattr(os, "fsync", raises(FULL))
    for call in (writing.check_target, writing.check_folder):
        with rejected("*/new", ..., "cannot be written (No space left on device)", "give another"):
            call(tmp_path / "new", "--out")
    monkeypatch.setattr(os, "access", lambda *_: False)  # as if the user were not root
    with rejected("*/file", ..., "cannot be written (Permission denied)", "give another"):
        writing.check_target(path, "--out")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_folders_are_checked_before_the_work(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a" / "b"
    assert writing.check_folder(folder, "--html") == folder and not os.listdir(tmp_path)
    (tmp_path / "a").write_text("")
    (tmp_path / "dangling").symlink_to("none")
    for path in (tmp_path / "a", folder, tmp_path / "dangling", tmp_path / "dangling" / "b"):
        with rejected(f"--html {path}", ..., "cannot be written (Not a directory)"):
            writing.check_folder(path, "--html")


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_try_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
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
def test_lost_file_fails(tmp_path: pathlib.Path, lose: Callable[[pathlib.Path], object]) -> None:
    path, output = tmp_path / "lines", []
    lines, strict = writing.LineFile(path, output.append), writing.LineFile(path)
    lines.write("a")
    lose(path)
    for _ in range(2):
        lines.write("b")
    (error,) = output  # reported once
    assert str(error).startswith(f"{path} was moved, replaced or deleted while the run was")
    with rejected("*/lines", ..., "was moved, replaced or deleted while the run was"):
        strict.write("c")


def test_full_disk_is_reported_once() -> None:
    output: list[UserError] = []
    lines = writing.LineFile(pathlib.Path("/dev/full"), output.append)
    for _ in range(3):
        lines.write("a")
    (error,) = output
    assert str(error).startswith("/dev/full cannot be written (No space left on device); free")


def test_a_folder_appears_when_it_is_complete(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a" / "out"
    with pytest.raises(RuntimeError), writing.complete_folder(folder) as scratch:
        (scratch / "first").write_text("1")
        raise RuntimeError  # as a signal handler may
    assert not list((tmp_path / "a").iterdir())
    folder.mkdir()
    with writing.complete_folder(folder) as scratch:
        (scratch / "first").write_text("1")
        assert not list(folder.iterdir())
    assert [path.name for path in folder.iterdir()] == ["first"]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
