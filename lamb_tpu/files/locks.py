"""Locks that keep a second process on this machine out of a folder."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from lamb_tpu.errors import UserError


@contextlib.contextmanager
def hold(path: pathlib.Path, refusal: str | None = None) -> Iterator[None]:
    """Holds a lock while the context lasts.

    Args:
      path: a file, which is made if it is missing, or a folder.
      refusal: message of the error if another process holds it; None: wait until it is free.

    Raises:
      UserError: another process holds it.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    lock = os.open(path, flags, 0o666)
    try:
        try:
            # Freed even by kill -9.
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if refusal is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(refusal or "") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(lock)
