"""Paths and objects in a bucket: what is refused before anything is asked, and what it answers."""

import os
import pathlib
import re

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading, writing
from tests import gcs


def folder(name: str = "runs/a") -> pathlib.Path:
    return buckets.parse(f"gs://bucket/{name}", "--workdir")


@pytest.mark.parametrize(
    "path, told",
    [
        ("s3://bucket/x", "is remote; give a local or mounted folder, or gs://BUCKET/FOLDER"),
        ("gs://bucket", "names no folder of a bucket"),
        ("gs:///x", "names no folder of a bucket"),
        ("gs://bucket/run[1]", r"one of \[ \] \* \? #"),
        ("gs://bucket/a/../b", r"has '\.\.'"),
    ],
)
def test_paths_that_are_refused(path: str, told: str) -> None:
    with pytest.raises(UserError, match=f"^--workdir {re.escape(path)} .*{told}"):
        buckets.parse(path, "--workdir")


def test_missing_library_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs gcsfs, which is not installed: pip install gcsfs$"):
        folder()


def test_paths_of_this_machine_stay(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert buckets.parse("run", "--workdir") == tmp_path / "run"
    assert type(buckets.parse("run", "--workdir")) is type(tmp_path)
    assert not buckets.is_remote(tmp_path) and buckets.is_remote("gs://a/b")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert buckets.local("~/x", "--out") == tmp_path / "x"
    with pytest.raises(UserError, match="^--out gs://a/b is remote; give a path of this machine$"):
        buckets.local("gs://a/b", "--out")


def test_objects_come_back_whole(bucket: gcs.Store) -> None:
    path = folder() / "config.json"
    assert os.fspath(path) == "gs://bucket/runs/a/config.json"
    with pytest.raises(FileNotFoundError):
        buckets.read(path)
    writing.replace(path, "ä\r\n")
    assert bucket.history == [("runs/a/config.json", "ä\r\n".encode())]
    assert reading.read_text(path) == "ä\r\n"
    # Whoever else writes is seen at once.
    bucket.write("runs/a/config.json", b"{}")
    bucket.write("runs/a/state/1", b"")
    assert reading.read_json(path) == {}
    assert sorted(child.name for child in buckets.children(folder())) == ["config.json", "state"]
    assert [reading.kind(folder() / name) for name in ("config.json", "state", "none")] == [
        "a file",
        "a folder",
        None,
    ]
    assert buckets.sums(folder())["state/1"] == "d41d8cd98f00b204e9800998ecf8427e"
    buckets.remove(folder())
    assert bucket.names() == [] and buckets.children(folder()) == []
    buckets.remove(folder())


def test_large_objects_come_back_whole(bucket: gcs.Store) -> None:
    data = os.urandom(12 << 20)  # more than a client sends in one request
    buckets.write(folder() / "large", data)
    assert buckets.read(folder() / "large") == data


def test_missing_bucket_and_permission_are_told(bucket: gcs.Store) -> None:
    elsewhere = buckets.parse("gs://nowhere/x", "--workdir")
    with pytest.raises(UserError, match="^--workdir gs://nowhere/x: there is no bucket nowhere"):
        buckets.check(elsewhere, "--workdir")
    with pytest.raises(OSError, match="there is no bucket nowhere"):
        buckets.write(elsewhere, b"")
    buckets.check(folder(), "--workdir")
    assert bucket.history == []
    bucket.refuse = lambda method, name: 403
    with pytest.raises(UserError, match=r"cannot be read \(no permission: .*is refused\); give"):
        buckets.check(folder(), "--workdir")
    with pytest.raises(OSError) as raised:
        buckets.write(folder() / "x", b"")
    assert raised.value.strerror == "no permission: runs/a/x is refused"
    with pytest.raises(UserError, match="x cannot be written .*see to it that the bucket can be"):
        writing.replace(folder() / "x", "")


def test_missing_credentials_are_told(bucket: gcs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from google.auth.exceptions import DefaultCredentialsError

    def client() -> None:
        raise DefaultCredentialsError("a page of text")

    monkeypatch.setattr(buckets, "client", client)
    with pytest.raises(UserError, match=r"\(no credentials are there, which gcloud .* makes\)"):
        buckets.check(folder(), "--workdir")


@pytest.mark.long
def test_request_that_fails_is_tried_again(bucket: gcs.Store) -> None:
    failed = set()

    def fail_once(method: str, name: str) -> int:
        failing = (method, name) not in failed
        failed.add((method, name))
        return 503 * failing

    bucket.refuse = fail_once
    buckets.check(folder(), "--workdir")
    buckets.write(folder() / "x", b"1")
    assert buckets.read(folder() / "x") == b"1"
    assert {method for method, _ in failed} == {"GET", "POST"}


def test_probe_leaves_nothing(bucket: gcs.Store) -> None:
    writing.try_out(folder())
    assert len(bucket.history) == 2 and not bucket.blobs
