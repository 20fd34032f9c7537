"""Checksums of a checkpoint's files."""

import json
import pathlib
from collections.abc import Callable

import pytest

from lamb_tpu.store import checksums


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The files of a checkpoint without which it cannot be read, and some others."""
    for name in ("state/d/data", "state/manifest.ocdbt", "state/_METADATA", "position/data.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(range(256)))
    (tmp_path / "state" / "empty").write_bytes(b"")
    (tmp_path / "top").write_text("Orbax changes this one later")
    checksums.write(tmp_path)
    return tmp_path


def unlist(folder: pathlib.Path, name: str) -> None:
    """Takes a file out of the list."""
    sums = json.loads((folder / checksums.NAME).read_text())
    del sums[name]
    (folder / checksums.NAME).write_text(json.dumps(sums))


def lose(folder: pathlib.Path, name: str) -> None:
    """Takes a file out of the list and of the folder."""
    unlist(folder, name)
    (folder / name).unlink()


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
        (lambda f: (f / checksums.NAME).write_text("{}"), "is not in sha256.json"),
        (lambda f: (f / checksums.NAME).write_text("[]"), "AttributeError"),
        (lambda f: (f / checksums.NAME).write_bytes(b"\xff"), "UnicodeDecodeError"),
        (lambda f: unlist(f, "state/d/data"), "state/d/data is not in sha256.json"),
        (lambda f: lose(f, "state/d/data"), r"state/d/* is missing"),
        (lambda f: lose(f, "state/_METADATA"), "state/_METADATA is missing"),
        (lambda f: lose(f, "state/manifest.ocdbt"), "state/manifest.ocdbt is missing"),
        (lambda f: lose(f, "position/data.json"), "position/data.json is missing"),
    ],
)
def test_what_is_not(
    folder: pathlib.Path, damage: Callable[[pathlib.Path], object], found: str
) -> None:
    damage(folder)
    assert found in checksums.find_damage(folder)
    if "as it was" not in found:  # seen without reading the files
        assert found in checksums.find_damage(folder, contents=False)


def test_nothing_is_not_a_whole_checkpoint(tmp_path: pathlib.Path) -> None:
    (tmp_path / checksums.NAME).write_text("{}")
    assert checksums.find_damage(tmp_path) == "position/data.json is missing"


def test_what_was_not_merged_is_not_sealed(folder: pathlib.Path) -> None:
    (folder / checksums.NAME).unlink()
    (folder / "state/manifest.ocdbt").unlink()
    with pytest.raises(ValueError, match="state/manifest.ocdbt is missing: it was not written"):
        checksums.write(folder)
    assert not (folder / checksums.NAME).exists()


def test_every_single_bit_counts(folder: pathlib.Path) -> None:
    data = folder / "state" / "d" / "data"
    whole = data.read_bytes()
    for position in range(0, 256, 37):
        data.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :]
        )
        assert checksums.find_damage(folder) == "state/d/data is not as it was written"
