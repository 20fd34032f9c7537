"""Locks that keep a second process on this machine out of a folder."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from lamb_tpu.errors import UserError


@contextlib.contextmanager
def hold(path: pathlib.Path, error: UserError | None = None) -> Iterator[None]:
    """Holds a lock on a folder or file while the context lasts; creates a missing file.

    If another process holds the lock, raises `error`; if `error` is None, waits for the lock.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    lock = os.open(path, flags, 0o666)
    try:
        try:
            # The system frees this lock even after kill -9.
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if error is None else fcntl.LOCK_NB))
        except BlockingIOError:
            assert error is not None  # without LOCK_NB the call waits
            raise error from None
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        os.close(lock)
