"""Growing files: uploads to a bucket, failed uploads, and removal of the temporary folder."""

import pathlib

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, uploads, writing
from tests import gcs


@pytest.fixture
def path(bucket: gcs.Store) -> pathlib.Path:
    return buckets.parse("gs://bucket/run/metrics.jsonl", "--workdir")


def test_lines_are_uploaded_when_due_and_at_the_end(
    bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write("run/metrics.jsonl", b"0\n")
    lines = writing.LineFile(path)
    lines.write("1")
    assert bucket.text("run/metrics.jsonl") == "0\n"
    lines.flush()
    lines.flush()  # nothing has grown
    assert [data for _, data in bucket.history] == [b"0\n", b"0\n1\n"]
    monkeypatch.setattr(uploads, "_SECONDS", 0)
    monkeypatch.setattr(uploads, "_REST", 0)
    lines.write("2")
    lines.flush()
    lines.write("3")
    assert bucket.text("run/metrics.jsonl") == "0\n1\n2\n3\n"
    lines.write("4")
    lines.close()
    lines.close()
    assert bucket.text("run/metrics.jsonl") == "0\n1\n2\n3\n4\n"


def test_failed_upload_is_reported_once(bucket: gcs.Store, path: pathlib.Path) -> None:
    output: list[UserError] = []
    lines = writing.LineFile(path, output.append)
    lines.write("1")
    bucket.reject = lambda method, name: 403 * (method == "POST")
    lines.flush()
    lines.write("2")
    lines.close()
    assert [str(error).partition("(")[0] for error in output] == [f"{path} cannot be written "]


def test_temporary_folder_is_removed(path: pathlib.Path) -> None:
    upload = uploads.Upload(path.parent)
    assert upload.fetch("none") == upload.local / "none" and upload.local.is_dir()
    upload.close()
    assert not upload.local.exists()
