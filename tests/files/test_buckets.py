"""Buckets: rejected paths, reads and writes, and errors of the client libraries."""

import os
import pathlib
import time
from typing import Any

import fsspec
import pytest

from lamb_tpu.files import buckets, reading, writing
from tests import gcs, tiny
from tests.raising import rejected


def folder(name: str = "runs/a") -> pathlib.Path:
    return buckets.parse(f"gs://bucket/{name}", "--workdir")


@pytest.mark.parametrize(
    "path, output",
    [
        ("s3://bucket/x", ("--workdir s3://bucket/x", ..., "has an unsupported", "give a local")),
        ("gs://bucket", ("--workdir gs://bucket", ..., "names no folder in a bucket")),
        ("gs:///x", ("--workdir gs:///x", ..., "names no folder in a bucket")),
        ("gs://bucket/run[1]", ("--workdir gs://bucket/run[1]", ..., "has '..', '.' or one of [")),
        ("gs://bucket/a/../b", ("--workdir gs://bucket/a/../b", ..., "has '..', '.' or one of [")),
    ],
)
def test_rejected_paths(path: str, output: tuple[Any, ...]) -> None:
    with rejected(*output):
        buckets.parse(path, "--workdir")


def test_missing_library_error_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets.importlib.util, "find_spec", lambda name: None)
    with rejected("--workdir gs://bucket/runs/a", ..., "needs gcsfs, which is not installed"):
        folder()


def test_local_paths_stay(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert buckets.parse("run", "--workdir") == tmp_path / "run"
    assert type(buckets.parse("run", "--workdir")) is type(tmp_path)
    assert not buckets.is_remote(tmp_path) and buckets.is_remote("gs://a/b")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert buckets.local("~/x", "--out") == tmp_path / "x"
    with rejected("--out gs://a/b", ..., "is remote", "give a local path"):
        buckets.local("gs://a/b", "--out")


def test_objects_are_read_back(bucket: gcs.Store) -> None:
    path = folder() / "config.json"
    assert os.fspath(path) == "gs://bucket/runs/a/config.json"
    with pytest.raises(FileNotFoundError):
        buckets.read(path)
    writing.replace(path, "ä\r\n")
    assert bucket.history == [("runs/a/config.json", "ä\r\n".encode())]
    assert reading.read_text(path) == "ä\n"  # line ends are normalised as in a local file
    # Another client's write is visible at once.
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


def test_large_objects_are_read_back(bucket: gcs.Store) -> None:
    data = os.urandom(12 << 20)  # more than a client sends in one request
    buckets.write(folder() / "large", data)
    assert buckets.read(folder() / "large") == data


def test_missing_bucket_and_permission_are_reported(bucket: gcs.Store) -> None:
    elsewhere = buckets.parse("gs://nowhere/x", "--workdir")
    with rejected("--workdir gs://nowhere/x", ..., ": there is no bucket nowhere"):
        buckets.check(elsewhere, "--workdir")
    with pytest.raises(OSError, match="there is no bucket nowhere"):
        buckets.write(elsewhere, b"")
    buckets.check(folder(), "--workdir")
    assert bucket.history == []
    bucket.reject = lambda method, name: 403
    with rejected("--workdir gs://bucket/runs/a", ..., "cannot be read (no permission: is"):
        buckets.check(folder(), "--workdir")
    with pytest.raises(OSError) as raised:
        buckets.write(folder() / "x", b"")
    assert raised.value.strerror == "no permission: runs/a/x is rejected"
    with rejected("gs://bucket/runs/a/x", ..., "cannot be written (no permission:"):
        writing.replace(folder() / "x", "")


def test_missing_credentials(bucket: gcs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from google.auth.exceptions import DefaultCredentialsError

    def client() -> None:
        raise DefaultCredentialsError("a page of text")

    monkeypatch.setattr(buckets, "client", client)
    with rejected("--workdir gs://bucket/runs/a", ..., "cannot be read (there are no cred"):
        buckets.check(folder(), "--workdir")


@pytest.mark.long
def test_request_that_fails_is_tried_again(bucket: gcs.Store) -> None:
    failed = set()

    def fail_once(method: str, name: str) -> int:
        failing = (method, name) not in failed
        failed.add((method, name))
        return 503 * failing

    bucket.reject = fail_once
    buckets.check(folder(), "--workdir")
    buckets.write(folder() / "x", b"1")
    assert buckets.read(folder() / "x") == b"1"
    assert {method for method, _ in failed} == {"GET", "POST"}


def test_probe_leaves_nothing(bucket: gcs.Store) -> None:
    writing.try_out(folder())
    assert len(bucket.history) == 2 and not bucket.blobs


def test_waiting_is_reported(
    bucket: gcs.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(buckets, "REPORT_SECONDS", 0.05)
    bucket.reject = lambda method, name: time.sleep(0.5) or 0
    buckets.write(folder() / "x", b"1")
    output = "gs://bucket/runs/a/x does not answer; waiting for 0 s, giving up after 100 s"
    assert tiny.unbroken(capsys.readouterr().err) == output
    bucket.reject = lambda method, name: 0
    monkeypatch.setattr(buckets, "REPORT_SECONDS", 10.0)
    buckets.write(folder() / "x", b"1")
    assert capsys.readouterr().err == ""


def test_request_without_an_answer_ends(bucket: gcs.Store) -> None:
    """Requests time out after at most 10 s; the libraries' defaults are 5 minutes, or no limit."""
    folder()
    timeout = fsspec.filesystem("gcs").requests_timeout
    assert 0 < timeout.sock_connect <= 10 and 0 < timeout.sock_read <= 10
    assert buckets.patience()["timeout"] <= 10
    assert buckets.patience()["retry"].timeout == buckets.GIVE_UP_SECONDS
    assert 0 < int(os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"]) <= 10
    assert 0 < int(os.environ["TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS"]) <= 10


def test_given_up_bucket_fails_at_once(bucket: gcs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_given_up", {})
    monkeypatch.setattr(buckets, "REPORT_SECONDS", 0.0)  # as if each error came after a long wait
    bucket.reject = lambda method, name: 403
    with pytest.raises(OSError, match="no permission"):
        buckets.write(folder() / "x", b"1")
    bucket.reject = lambda method, name: 0
    with rejected("gs://bucket/runs/a/x", ..., "cannot be written (the bucket did not"):
        writing.replace(folder() / "x", "1")
    monkeypatch.setattr(buckets.time, "monotonic", lambda: time.perf_counter() + 1e9)
    writing.replace(folder() / "x", "1")


@pytest.mark.parametrize(
    "error, expected",
    [
        (TimeoutError("reading"), "the bucket does not answer"),
        (FileNotFoundError("http://x/upload"), "the bucket or an object in it does not exist"),
        (ValueError("NOT_FOUND: Error writing x"), "the bucket or an object in it does not exist"),
        (ValueError("UNAVAILABLE: CURL error Timeout"), "the bucket does not answer"),
    ],
)
def test_reasons_are_plain(error: Exception, expected: str) -> None:
    assert writing.reason(error) == expected


def test_reason_of_repeated_attempts_is_that_of_the_last() -> None:
    from google.api_core.exceptions import RetryError

    error = RetryError("Timeout of 100.0s exceeded", cause=TimeoutError("reading"))
    assert buckets.reason(error) == "the bucket does not answer"
