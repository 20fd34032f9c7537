"""Locks that keep a second process on this machine out of a folder."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from lamb_tpu.errors import UserError


@contextlib.contextmanager
def hold(path: pathlib.Path, refusal: str) -> Iterator[None]:
    """Holds a lock file, which is made if it is missing, while the context lasts.

    Args:
      path: the file.
      refusal: message of the error if another process holds it.

    Raises:
      UserError: another process holds it.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed even by kill -9
        except BlockingIOError:
            raise UserError(refusal) from None
        except OSError:
            pass  # a file system without locks
        yield
