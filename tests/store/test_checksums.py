"""Checksums of a checkpoint's files."""

import json
import pathlib
from collections.abc import Callable

import pytest

from lamb_tpu.files import buckets
from lamb_tpu.store import checksums
from tests import gcs


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the files that a checkpoint needs, and two other files."""
    for name in ("state/d/data", "state/manifest.ocdbt", "state/_METADATA", "position/data.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(range(256)))
    (tmp_path / "state" / "empty").write_bytes(b"")
    (tmp_path / "top").write_text("Orbax changes this one later")
    checksums.write(tmp_path)
    return tmp_path


def unlist(folder: pathlib.Path, name: str) -> None:
    """Removes a file from the list of checksums."""
    sums = json.loads((folder / checksums.NAME).read_text())
    del sums[name]
    (folder / checksums.NAME).write_text(json.dumps(sums))


def lose(folder: pathlib.Path, name: str) -> None:
    """Removes a file from the list of checksums and from the folder."""
    unlist(folder, name)
    (folder / name).unlink()


def test_intact_folders(folder: pathlib.Path) -> None:
    assert checksums.find_damage(folder) is None
    (folder / "top").write_text("changed")
    assert checksums.find_damage(folder) is None


@pytest.mark.parametrize(
    "damage, expected",
    [
        (lambda f: (f / "state/d/data").write_bytes(bytes(255)), "state/d/data has changed"),
        (lambda f: (f / "state/d/data").unlink(), "state/d/data is missing"),
        (
            lambda f: (f / "state/empty").write_bytes(b"x"),
            "state/empty has changed since it was written",
        ),
        (lambda f: (f / checksums.NAME).unlink(), "sha256.json is missing"),
        (lambda f: (f / checksums.NAME).write_text("{"), "sha256.json cannot be read: "),
        (lambda f: (f / checksums.NAME).write_text("{}"), "is not in sha256.json"),
        (lambda f: (f / checksums.NAME).write_text("[]"), "sha256.json is not a JSON object"),
        (lambda f: (f / checksums.NAME).write_bytes(b"\xff"), "cannot be read: line 1 is not"),
        (lambda f: unlist(f, "state/d/data"), "state/d/data is not in sha256.json"),
        (lambda f: lose(f, "state/d/data"), r"state/d/* is missing"),
        (lambda f: lose(f, "state/_METADATA"), "state/_METADATA is missing"),
        (lambda f: lose(f, "state/manifest.ocdbt"), "state/manifest.ocdbt is missing"),
        (lambda f: lose(f, "position/data.json"), "position/data.json is missing"),
    ],
)
def test_damaged_folders(
    folder: pathlib.Path, damage: Callable[[pathlib.Path], object], expected: str
) -> None:
    damage(folder)
    assert expected in checksums.find_damage(folder)
    if "has changed" not in expected:  # detected without reading the files
        assert expected in checksums.find_damage(folder, contents=False)


def test_empty_folder_is_not_a_checkpoint(tmp_path: pathlib.Path) -> None:
    (tmp_path / checksums.NAME).write_text("{}")
    assert checksums.find_damage(tmp_path) == "position/data.json is missing"


def test_unmerged_arrays_are_not_sealed(folder: pathlib.Path) -> None:
    (folder / checksums.NAME).unlink()
    (folder / "state/manifest.ocdbt").unlink()
    with pytest.raises(ValueError, match="state/manifest.ocdbt is missing: the checkpoint"):
        checksums.write(folder)
    assert not (folder / checksums.NAME).exists()


def test_every_single_bit_counts(folder: pathlib.Path) -> None:
    data = folder / "state" / "d" / "data"
    content = data.read_bytes()
    for position in range(0, 256, 37):
        data.write_bytes(
            content[:position]
            + bytes([content[position] ^ 1 << position % 8])
            + content[position + 1 :]
        )
        assert checksums.find_damage(folder) == "state/d/data has changed since it was written"


@pytest.fixture
def there(bucket: gcs.Store, folder: pathlib.Path) -> pathlib.Path:
    """A checkpoint in a bucket, with the same files as `folder`."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name != checksums.NAME:
            bucket.write(f"run/7/{path.relative_to(folder)}", path.read_bytes())
    there = buckets.parse("gs://bucket/run/7", "--workdir")
    checksums.write(there)
    assert checksums.find_damage(there) == "commit_success.txt is missing"
    bucket.write("run/7/commit_success.txt", b"")
    return there


def test_in_a_bucket_nothing_is_read_back(bucket: gcs.Store, there: pathlib.Path) -> None:
    assert set(json.loads(bucket.text("run/7/md5.json"))) == {
        "state/d/data",
        "state/manifest.ocdbt",
        "state/_METADATA",
        "position/data.json",
        "state/empty",
    }
    asked = []
    bucket.reject = lambda method, name: asked.append(name) or 0
    assert checksums.find_damage(there) is None
    assert not [name for name in asked if name.startswith(("run/7/state", "run/7/position"))]
    bucket.write("run/7/state/d/data", bytes(256))
    assert checksums.find_damage(there) == "state/d/data has changed since it was written"
    assert checksums.find_damage(there, contents=False) is None
    bucket.delete("run/7/state/d/data", {})
    assert checksums.find_damage(there) == "state/d/data is missing"


def test_object_composed_of_several_is_read(
    bucket: gcs.Store, there: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "sums", lambda folder, of=buckets.sums: dict.fromkeys(of(folder)))
    assert checksums.find_damage(there) is None
    bucket.write("run/7/state/d/data", bytes(256))
    assert checksums.find_damage(there) == "state/d/data has changed since it was written"


def test_only_a_complete_save_counts_in_a_bucket(bucket: gcs.Store, there: pathlib.Path) -> None:
    assert checksums.is_committed(there)
    assert not checksums.is_committed(there.with_name("8"))
    bucket.write("run/best/commit_success.txt", b"")
    assert not checksums.is_committed(there.with_name("best"))
