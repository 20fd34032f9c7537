"""Writing of files, with plain errors for disks that are full, read-only or lose the folder."""

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Callable, Iterator

from lamb_tpu.errors import UserError

_ADVICE = (
    "free space or repair the disk, then start the same command again: it goes on from the last "
    "checkpoint"
)
# Messages of the C library, because TensorStore gives its errors as text only.
_KNOWN = [
    os.strerror(number)
    for number in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
        errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOTCONN, errno.ENOTDIR, errno.ENOENT,
    )
]


def reason(error: BaseException) -> str:
    """Returns the cause of a failed write in a few words, such as 'No space left on device'."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    for known in _KNOWN:
        if known in text:
            return known
    return f"{type(error).__name__}: {text[:200]}"


@contextlib.contextmanager
def checked(path: str | os.PathLike[str], flag: str = "") -> Iterator[None]:
    """Turns an OSError of the block, which writes `path`, into a UserError of one sentence.

    Args:
      path: the file or folder that the block writes.
      flag: the command-line flag that named the path, such as '--out'; '' for a file of a run,
        which can be resumed.
    """
    try:
        yield
    except OSError as error:
        name, advice = (f"{flag} {path}", "give another") if flag else (path, _ADVICE)
        raise UserError(f"{name} cannot be written ({reason(error)}); {advice}") from None


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file by rename, so that a killed process leaves the old file or the new one.

    Raises:
      UserError: the file cannot be written; the old one is left.
    """
    # In the same folder, because a rename is atomic within one file system only.
    temporary = path.with_name(path.name + ".new")
    with checked(path):
        try:
            temporary.write_text(text, "utf-8")
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()  # a full disk has no room for it
            raise


def try_out(folder: pathlib.Path) -> None:
    """Writes, syncs, renames and removes a small file in a folder, as a save does with large ones.

    Raises:
      OSError: one of these operations failed, or the folder is missing.
    """
    # Several processes may do this at once, so the name must be unique.
    first = folder / f".write-probe-{socket.gethostname()}-{os.getpid()}"
    second = first.with_name(first.name + "-renamed")
    try:
        with first.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            # Without it the bytes may lie in a cache only, and a full disk shows later.
            os.fsync(file.fileno())
        first.rename(second)
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                path.unlink()


class LineFile:
    """A text file that grows by whole lines, none of which is lost when the process is killed.

    Args:
      path: the file to append to; created if it is missing.
      failed: called once with a UserError when a line cannot be written, or `path` is no longer
        this file; later lines are dropped. None raises the error instead.

    Raises:
      UserError: the file cannot be opened.
    """

    def __init__(
        self, path: pathlib.Path, failed: Callable[[UserError], None] | None = None
    ) -> None:
        self._path, self._failed = path, failed
        with checked(path):
            # Unbuffered: otherwise a line that a full disk refused would be written again at close.
            self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Appends one line."""
        if self._file.closed:
            return
        data = f"{line}\n".encode()
        try:
            self._check_place()
            with checked(self._path):
                # An unbuffered write may take only a part of the data.
                while data:
                    data = data[self._file.write(data) :]
        except UserError as error:
            self.close()
            if self._failed is None:
                raise
            self._failed(error)

    def _check_place(self) -> None:
        """Refuses a file that was moved or deleted: it can still be written, but would be lost."""
        try:
            # The open file is compared with what its path leads to.
            if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                return
        except OSError:
            pass
        raise UserError(
            f"{self._path} was moved, replaced or deleted while the run wrote it; put its folder "
            "back and start the same command again, or start it with another --workdir"
        )

    def close(self) -> None:
        """Closes the file; it may be closed already."""
        with contextlib.suppress(OSError):
            self._file.close()
