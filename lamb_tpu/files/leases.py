"""Locks in a bucket, which keep runs on other machines out of a folder there.

A lock is an object that is created only if it is absent, and renewed while its run goes on. That of
a process of this machine that has ended is taken over, as the system frees a lock on a disk.
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
_STALE_SECONDS = 300.0  # without a renewal, the run has probably ended


@contextlib.contextmanager
def hold(
    path: pathlib.Path, folder: str, lost: Callable[[UserError], None] = lambda error: None
) -> Iterator[None]:
    """Holds a lock while the context lasts.

    Args:
      path: the lock's object.
      folder: the flag and the folder that the lock is for, for messages.
      lost: called with an error, in a thread, if somebody has removed the lock or taken it over.

    Raises:
      UserError: another process holds it, or it cannot be written.
    """
    lease = _Lease(path, folder)
    lease.take()
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_SECONDS):
            if not lease.renew():
                lost(
                    UserError(
                        f"the lock {path} was removed or taken over, so another run may write there "
                        "now; start the same command again when none does"
                    )
                )
                return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
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
        self._generation = 0  # that of no object

    def take(self) -> None:
        """Creates the lock, or takes over that of a process of this machine that has ended."""
        try:
            with buckets.plain_errors():
                if self._write(0):
                    return
                there = self._bucket().get_blob(buckets.split(self._path)[1])
                if there is None:  # it was released in the meantime
                    ended, owner, age = True, {}, 0.0
                else:
                    owner = buckets.parse_json(there.download_as_bytes())
                    owner = owner if isinstance(owner, dict) else {}
                    now = datetime.datetime.now(datetime.UTC)
                    age = (now - there.updated).total_seconds()
                    ended = _has_ended(owner)
                if ended and self._write(there.generation if there is not None else 0):
                    return
        except OSError as error:
            raise UserError(
                f"{self._folder} cannot be locked ({error.strerror}); give a folder that can be "
                "written"
            ) from None
        who = f"process {owner.get('process', '?')} on {owner.get('host', '?')}"
        if age < _STALE_SECONDS:
            raise UserError(
                f"{self._folder} is in use by another run ({who}, seen {_duration(age)} ago); wait "
                "until it ends, or give another folder"
            )
        raise UserError(
            f"{self._folder} is locked by {who}, last seen {_duration(age)} ago; if that run has "
            f"ended, remove its lock with gcloud storage rm {self._path}"
        )

    def renew(self) -> bool:
        """Writes the lock anew; returns False if it is no longer this process'."""
        try:
            with buckets.plain_errors():
                return self._write(self._generation)
        except OSError:
            return True  # what the bucket does not answer now, it tells the next time

    def release(self) -> None:
        """Removes the lock if it is still this process'."""
        with contextlib.suppress(OSError), buckets.plain_errors():
            from google.api_core import exceptions

            with contextlib.suppress(exceptions.NotFound, exceptions.PreconditionFailed):
                self._blob().delete(if_generation_match=self._generation)

    def _write(self, generation: int) -> bool:
        """Writes the lock if its generation is that, 0 for none; returns whether it was."""
        from google.api_core import exceptions

        blob = self._blob()
        try:
            blob.upload_from_string(json.dumps(self._owner), if_generation_match=generation)
        except exceptions.PreconditionFailed:
            # The first of two attempts may have arrived without an answer.
            there = self._bucket().get_blob(blob.name)
            own = there is not None and buckets.parse_json(there.download_as_bytes())
            if own != self._owner:
                return False
            blob = there
        self._generation = blob.generation
        return True

    def _bucket(self) -> Any:
        return buckets.client().bucket(buckets.split(self._path)[0])

    def _blob(self) -> Any:
        return self._bucket().blob(buckets.split(self._path)[1])


def _machine() -> str:
    """Returns a name of this start of this machine and its processes; '' if it has none."""
    try:
        # Numbers of processes mean the same within one namespace only, such as a container.
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a system other than Linux
        return ""


def _has_ended(owner: dict[str, Any]) -> bool:
    """Returns whether a lock's owner was a process of this machine, and is no more."""
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
