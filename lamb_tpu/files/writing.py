"""Writes files on disks that may fill up, turn read-only or lose the folder, with plain errors."""

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
# By what C libraries call them: TensorStore tells its errors as text alone.
_KNOWN = [
    os.strerror(number)
    for number in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
        errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOTCONN, errno.ENOTDIR, errno.ENOENT,
    )
]


def reason(error: BaseException) -> str:
    """The cause of a failed write in a few words, such as 'No space left on device'."""
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
      path: what is written.
      flag: of the command line that named it, such as '--out'; '' for a file of a run, which can
        be resumed.
    """
    try:
        yield
    except OSError as error:
        name, advice = (f"{flag} {path}", "give another") if flag else (path, _ADVICE)
        raise UserError(f"{name} cannot be written ({reason(error)}); {advice}") from None


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file by rename: whoever is killed here leaves the old one or the new one.

    Raises:
      UserError: it cannot be written; the old one is left.
    """
    temporary = path.with_name(path.name + ".new")
    with checked(path):
        try:
            temporary.write_text(text, "utf-8")
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()  # a disk that is full has no room for it
            raise


def try_out(folder: pathlib.Path) -> None:
    """Writes, syncs, renames and removes a small file in a folder, as a save does with large ones.

    Raises:
      OSError: one of these cannot be done, or the folder is not there.
    """
    # Several processes may do so at once.
    first = folder / f".write-probe-{socket.gethostname()}-{os.getpid()}"
    second = first.with_name(first.name + "-renamed")
    try:
        with first.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        first.rename(second)
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                path.unlink()


class LineFile:
    """A text file that grows by whole lines, none of which is lost when the process is killed.

    Args:
      path: appended to; made when missing.
      failed: receives a UserError, once, when a line cannot be written or the file is no longer
        the one at `path`; what is written later is dropped. None raises it instead.

    Raises:
      UserError: it cannot be opened.
    """

    def __init__(
        self, path: pathlib.Path, failed: Callable[[UserError], None] | None = None
    ) -> None:
        self._path, self._failed = path, failed
        with checked(path):
            # Unbuffered: what a full disk did not take must not be tried again at the end.
            self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Appends one line."""
        if self._file.closed:
            return
        data = f"{line}\n".encode()
        try:
            self._check_place()
            with checked(self._path):
                while data:
                    data = data[self._file.write(data) :]
        except UserError as error:
            self.close()
            if self._failed is None:
                raise
            self._failed(error)

    def _check_place(self) -> None:
        """A file that was deleted can still be written, and is lost all the same."""
        try:
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
