"""Locks in a bucket: a single holder, renewal, locks of ended processes, and stale locks."""

import datetime
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, leases
from tests import gcs
from tests.raising import rejected

NAME = "run/.lock"


@pytest.fixture
def path(bucket: gcs.Store) -> pathlib.Path:
    return buckets.parse(f"gs://bucket/{NAME}", "--workdir")


def test_second_holder_error_names_the_first(bucket: gcs.Store, path: pathlib.Path) -> None:
    with leases.hold(path, "--workdir gs://bucket/run"):
        problem = f"is in use by another run (process {os.getpid()} on "
        with (
            rejected("--workdir gs://bucket/run", ..., problem, "wait until it ends"),
            leases.hold(path, "--workdir gs://bucket/run"),
        ):
            pass
        assert bucket.names() == [NAME]
    assert bucket.names() == []
    with leases.hold(path, "--workdir gs://bucket/run"):
        pass


def test_lock_of_an_ended_process_is_taken_over(bucket: gcs.Store, path: pathlib.Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = {"host": "here", "process": ended.pid, "machine": leases._machine(), "token": "x"}
    bucket.write(NAME, json.dumps(left).encode())
    with leases.hold(path, "--workdir"):
        assert json.loads(bucket.text(NAME))["process"] == os.getpid()
    # The process id means nothing on another machine.
    bucket.write(NAME, json.dumps(left | {"machine": "other"}).encode())
    with rejected("--workdir", ..., "is in use by another run"), leases.hold(path, "--workdir"):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": "far", "process": 7}'])
def test_stale_lock_has_a_command(bucket: gcs.Store, path: pathlib.Path, content: bytes) -> None:
    bucket.write(NAME, content)
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=3)
    bucket.date(NAME, before)
    problem, remedy = "last seen 3 h ago", "remove its lock with gcloud storage rm gs://bucket/run/"
    with rejected("--workdir", ..., problem, remedy), leases.hold(path, "--workdir"):
        pass
    assert bucket.blobs[NAME].data == content


def test_renewal(bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.01)
    with leases.hold(path, "--workdir"):
        generation, written = bucket.blobs[NAME].generation, threading.Event()

        def see(method: str, name: str) -> int:
            if method == "POST":
                written.set()
            return 0

        bucket.reject = see
        for _ in range(2):  # a second request means that the first was answered
            assert written.wait(10)
            written.clear()
        assert bucket.blobs[NAME].generation > generation
    assert bucket.names() == []


@pytest.mark.parametrize("other", [None, b'{"token": "another"}'])
def test_lost_lock_is_reported_and_left(
    bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, other: bytes | None
) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.2)
    output, lost = [], threading.Event()

    def report(error: UserError) -> None:
        output.append(str(error))
        lost.set()

    with leases.hold(path, "--workdir", report):
        if other is None:
            bucket.delete(NAME, {})
        else:
            bucket.write(NAME, other)
        assert lost.wait(10)
    assert len(output) == 1 and output[0].startswith(f"the lock {path} was removed or taken over")
    assert bucket.names() == ([] if other is None else [NAME])


def test_bucket_that_does_not_answer_loses_nothing(
    bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = leases._Lease(path, "--workdir")
    lease.take()
    bucket.reject = lambda method, name: 403
    assert lease.renew()
    bucket.reject = lambda method, name: 0
    # If a request arrived but its answer was lost, the generation differs from the known one.
    bucket.write(NAME, bucket.blobs[NAME].data)
    assert lease.renew() and lease._generation == bucket.blobs[NAME].generation
    lease.release()
    assert bucket.names() == []


def test_missing_permission_is_reported(bucket: gcs.Store, path: pathlib.Path) -> None:
    bucket.reject = lambda method, name: 403
    with (
        rejected("--workdir x", ..., "cannot be locked (no permission:  is rejected)"),
        leases.hold(path, "--workdir x"),
    ):
        pass


def test_release_does_not_wait_for_a_renewal(
    bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.01)
    monkeypatch.setattr(buckets, "REPORT_SECONDS", 0.1)
    begun, answered = threading.Event(), threading.Event()
    monkeypatch.setattr(leases._Lease, "renew", lambda lease: begun.set() or answered.wait(60))
    with leases.hold(path, "--workdir"):
        assert begun.wait(10)
    assert not answered.is_set() and bucket.names() == []
    answered.set()
