"""Locks in a bucket: one holder, who it is, and what becomes of a lock that was left behind."""

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

NAME = "run/.lock"


@pytest.fixture
def path(bucket: gcs.Store) -> pathlib.Path:
    return buckets.parse(f"gs://bucket/{NAME}", "--workdir")


def test_second_holder_is_told_of_the_first(bucket: gcs.Store, path: pathlib.Path) -> None:
    with leases.hold(path, "--workdir gs://bucket/run"):
        who = f"process {os.getpid()} on .*, seen \\d s ago"
        with (
            pytest.raises(UserError, match=rf"^--workdir gs://bucket/run is in use .*\({who}\)"),
            leases.hold(path, "--workdir gs://bucket/run"),
        ):
            pass
        assert bucket.names() == [NAME]
    assert bucket.names() == []
    with leases.hold(path, "--workdir gs://bucket/run"):
        pass


def test_lock_of_a_process_that_has_ended_is_taken_over(
    bucket: gcs.Store, path: pathlib.Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = {"host": "here", "process": ended.pid, "machine": leases._machine(), "token": "x"}
    bucket.write(NAME, json.dumps(left).encode())
    with leases.hold(path, "--workdir"):
        assert json.loads(bucket.text(NAME))["process"] == os.getpid()
    # The number means nothing on another machine.
    bucket.write(NAME, json.dumps(left | {"machine": "other"}).encode())
    with pytest.raises(UserError, match="in use by another run"), leases.hold(path, "--workdir"):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": "far", "process": 7}'])
def test_stale_lock_is_told_with_its_command(
    bucket: gcs.Store, path: pathlib.Path, content: bytes
) -> None:
    bucket.write(NAME, content)
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=3)
    bucket.date(NAME, before)
    told = r"last seen 3 h ago; .* remove its lock with gcloud storage rm gs://bucket/run/.lock$"
    with pytest.raises(UserError, match=told), leases.hold(path, "--workdir"):
        pass
    assert bucket.blobs[NAME].data == content


def test_renewed_lock_is_young(
    bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.01)
    with leases.hold(path, "--workdir"):
        generation, written = bucket.blobs[NAME].generation, threading.Event()

        def see(method: str, name: str) -> int:
            if method == "POST":
                written.set()
            return 0

        bucket.refuse = see
        for _ in range(2):  # the first is known to be written when the second is asked for
            assert written.wait(10)
            written.clear()
        assert bucket.blobs[NAME].generation > generation
    assert bucket.names() == []


@pytest.mark.parametrize("other", [None, b'{"token": "another"}'])
def test_lost_lock_is_told_and_left(
    bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, other: bytes | None
) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.2)
    told, lost = [], threading.Event()

    def tell(error: UserError) -> None:
        told.append(str(error))
        lost.set()

    with leases.hold(path, "--workdir", tell):
        if other is None:
            bucket.delete(NAME, {})
        else:
            bucket.write(NAME, other)
        assert lost.wait(10)
    assert len(told) == 1 and told[0].startswith(f"the lock {path} was removed or taken over")
    assert bucket.names() == ([] if other is None else [NAME])


def test_bucket_that_does_not_answer_loses_nothing(
    bucket: gcs.Store, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = leases._Lease(path, "--workdir")
    lease.take()
    bucket.refuse = lambda method, name: 403
    assert lease.renew()
    bucket.refuse = lambda method, name: 0
    # An attempt that arrived without its answer: the generation is not the one that is known.
    bucket.write(NAME, bucket.blobs[NAME].data)
    assert lease.renew() and lease._generation == bucket.blobs[NAME].generation
    lease.release()
    assert bucket.names() == []


def test_no_permission_is_told(bucket: gcs.Store, path: pathlib.Path) -> None:
    bucket.refuse = lambda method, name: 403
    with (
        pytest.raises(UserError, match=r"^--workdir x cannot be locked \(no permission: .*refused"),
        leases.hold(path, "--workdir x"),
    ):
        pass
