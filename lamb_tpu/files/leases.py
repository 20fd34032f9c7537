"""Locks in a bucket, which keep runs on other machines out of a folder.

A lock is an object, which a run creates only if the object is absent, and renews until the run ends.
If the process that holds a lock has ended, another process on the same machine can take it over.
"""

import contextlib
import datetime
import json
import os
import pathlib
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets

_RENEW_SECONDS = 60.0
_STALE_SECONDS = 300.0  # time without a renewal, after which the run has probably ended


@contextlib.contextmanager
def hold(
    path: pathlib.Path, folder: str, lost: Callable[[UserError], None] = lambda error: None
) -> Iterator[None]:
    """Holds the lock `path` while the context lasts; `folder` is the locked folder, for messages.

    If the lock is removed or taken over, a background thread calls `lost` with a UserError. Raises a
    UserError if another process holds the lock, or if the lock cannot be written.
    """
    lease = _Lease(path, folder)
    lease.take()
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_SECONDS):
            if not lease.renew():
                lost(
                    UserError(
                        f"the lock {path}",
                        ...,
                        "was removed or taken over, so another run may now write into the folder",
                        "start the same command again when no other run uses the folder",
                    )
                )
                return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # A renewal may be waiting for a bucket that does not answer.
        thread.join(buckets.REPORT_SECONDS)
        lease.release()


class _Lease:
    def __init__(self, path: pathlib.Path, folder: str) -> None:
        self._path, self._folder = path, folder
        self._owner = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "machine": _machine(),
            "token": uuid.uuid4().hex,
        }
        self._generation = 0  # Cloud Storage's generation number of a missing object

    def take(self) -> None:
        """Creates the lock, or takes it over from a process of this machine that has ended."""
        try:
            with buckets.plain_errors(self._path):
                if self._write(0):
                    return
                lock = self._bucket().get_blob(buckets.split(self._path)[1], **buckets.patience())
                if lock is None:  # the lock was released in the meantime
                    ended, owner, age = True, {}, 0.0
                else:
                    owner = buckets.parse_json(lock.download_as_bytes(**buckets.patience()))
                    owner = owner if isinstance(owner, dict) else {}
                    now = datetime.datetime.now(datetime.UTC)
                    age = (now - lock.updated).total_seconds()
                    ended = _has_ended(owner)
                if ended and self._write(lock.generation if lock is not None else 0):
                    return
        except OSError as error:
            problem = f"cannot be locked ({error.strerror})"
            remedy = "give a folder that this machine can write to"
            raise UserError(self._folder, ..., problem, remedy) from None
        who = f"process {owner.get('process', '?')} on {owner.get('host', '?')}"
        if age < _STALE_SECONDS:
            problem = f"is in use by another run ({who}, seen {_duration(age)} ago)"
            remedy = "wait until it ends, or give another folder"
            raise UserError(self._folder, ..., problem, remedy)
        problem = f"is locked by {who}, last seen {_duration(age)} ago"
        remedy = f"if that run has ended, remove its lock with gcloud storage rm {self._path}"
        raise UserError(self._folder, ..., problem, remedy)

    def renew(self) -> bool:
        """Writes the lock again; returns False if the lock was removed or taken over."""
        try:
            with buckets.plain_errors(self._path):
                return self._write(self._generation)
        except OSError:
            return True  # the bucket does not answer, so the next renewal decides

    def release(self) -> None:
        """Removes the lock if this process still holds it."""
        with contextlib.suppress(OSError), buckets.plain_errors(self._path):
            from google.api_core import exceptions

            with contextlib.suppress(exceptions.NotFound, exceptions.PreconditionFailed):
                self._blob().delete(if_generation_match=self._generation, **buckets.patience())

    def _write(self, generation: int) -> bool:
        """Writes the lock if its generation is `generation` (0: no lock exists); returns whether it did."""
        from google.api_core import exceptions

        blob = self._blob()
        try:
            blob.upload_from_string(
                json.dumps(self._owner), if_generation_match=generation, **buckets.patience()
            )
        except exceptions.PreconditionFailed:
            # A retried request also fails if the first attempt arrived but its answer was lost.
            lock = self._bucket().get_blob(blob.name, **buckets.patience())
            current = lock is not None and buckets.parse_json(
                lock.download_as_bytes(**buckets.patience())
            )
            if current != self._owner:
                return False
            blob = lock
        self._generation = blob.generation
        return True

    def _bucket(self) -> Any:
        return buckets.client().bucket(buckets.split(self._path)[0])

    def _blob(self) -> Any:
        return self._bucket().blob(buckets.split(self._path)[1])


def _machine() -> str:
    """Returns an ID of this machine's boot and process namespace; '' if the system is not Linux."""
    try:
        # Process ids are unique only within one namespace, such as a container.
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a system other than Linux
        return ""


def _has_ended(owner: dict[str, Any]) -> bool:
    """Returns whether a lock's owner was a process of this machine that has ended."""
    if not owner.get("machine") or owner["machine"] != _machine():
        return False
    try:
        os.kill(int(owner["process"]), 0)
    except ProcessLookupError:
        return True
    except (KeyError, ValueError, PermissionError):
        pass
    return False


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
