"""Checksums of a folder's files."""

import pathlib
from collections.abc import Callable

import pytest

from lamb_tpu import checksums


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "state" / "d").mkdir(parents=True)
    (tmp_path / "state" / "d" / "data").write_bytes(bytes(range(256)))
    (tmp_path / "state" / "empty").write_bytes(b"")
    (tmp_path / "top").write_text("Orbax changes this one later")
    checksums.write(tmp_path)
    return tmp_path


def test_what_is_whole(folder: pathlib.Path) -> None:
    assert checksums.find_damage(folder) is None
    (folder / "top").write_text("changed")
    assert checksums.find_damage(folder) is None


@pytest.mark.parametrize(
    "damage, found",
    [
        (lambda f: (f / "state/d/data").write_bytes(bytes(255)), "state/d/data is not as it was"),
        (lambda f: (f / "state/d/data").unlink(), "state/d/data is missing"),
        (lambda f: (f / "state/empty").write_bytes(b"x"), "state/empty is not as it was written"),
        (lambda f: (f / checksums.NAME).unlink(), "sha256.json is missing"),
        (lambda f: (f / checksums.NAME).write_text("{"), "JSONDecodeError"),
        (lambda f: (f / checksums.NAME).write_text("[]"), "AttributeError"),
        (lambda f: (f / checksums.NAME).write_bytes(b"\xff"), "UnicodeDecodeError"),
    ],
)
def test_what_is_not(
    folder: pathlib.Path, damage: Callable[[pathlib.Path], object], found: str
) -> None:
    damage(folder)
    assert found in checksums.find_damage(folder)


def test_every_single_bit_counts(folder: pathlib.Path) -> None:
    data = folder / "state" / "d" / "data"
    whole = data.read_bytes()
    for position in range(0, 256, 37):
        data.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :]
        )
        assert checksums.find_damage(folder) == "state/d/data is not as it was written"
