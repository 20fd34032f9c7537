"""Writing of files, with plain errors for disks that are full, read-only or lose the folder."""

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Callable, Iterator

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.files.uploads import Upload

_AGAIN = "then start the same command again: it goes on from the last checkpoint"
# Messages of the C library, because TensorStore gives its errors as text only.
_KNOWN = [
    os.strerror(number)
    for number in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOTCONN,
        errno.ENOTDIR,
        errno.ENOENT,
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
    # TensorStore's errors of a bucket begin with such a word.
    if "PERMISSION_DENIED" in text or "Forbidden" in text:
        return "no permission"
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
        again = f"{repair(path)}, {_AGAIN}"
        name, advice = (f"{flag} {path}", "give another") if flag else (path, again)
        raise UserError(f"{name} cannot be written ({reason(error)}); {advice}") from None


def repair(path: str | os.PathLike[str]) -> str:
    """Returns what a user is to do before a write of a path can succeed."""
    if buckets.is_remote(path):
        return "see to it that the bucket can be written"
    return "free space or repair the disk"


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file by rename, so that a killed process leaves the old file or the new one.

    An object in a bucket is written whole anyway.

    Raises:
      UserError: the file cannot be written; the old one is left.
    """
    if buckets.is_remote(path):
        with checked(path):
            buckets.write(path, text.encode())
        return
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


def write(path: pathlib.Path, data: bytes) -> None:
    """Writes a file, or an object in a bucket.

    Raises:
      OSError: it cannot be written.
    """
    if buckets.is_remote(path):
        buckets.write(path, data)
    else:
        path.write_bytes(data)


def try_out(folder: pathlib.Path) -> None:
    """Writes, syncs, renames and removes a small file in a folder, as a save does with large ones.

    Raises:
      OSError: one of these operations failed, or the folder is missing.
    """
    # Several processes may do this at once, so the name must be unique.
    first = folder / f".write-probe-{socket.gethostname()}-{os.getpid()}"
    if buckets.is_remote(folder):
        buckets.write(first, bytes(4096))
        buckets.remove(first)
        return
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

    In a bucket, lines since the last `flush` may be lost, see `uploads.Upload`.

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
        self._upload: Upload | None = None
        with checked(path):
            if buckets.is_remote(path):
                self._upload = Upload(path.parent)
                path = self._upload.fetch(path.name)
            self._local = path
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
                if self._upload is not None:
                    self._upload.when_due()
        except UserError as error:
            self._fail(error)

    def flush(self) -> None:
        """Uploads what is not yet in the bucket; a file of this machine has every line."""
        if self._upload is None or self._file.closed:
            return
        try:
            with checked(self._path):
                self._upload.now()
        except UserError as error:
            self._fail(error)

    def _fail(self, error: UserError) -> None:
        self._close()
        if self._failed is None:
            raise error
        self._failed(error)

    def _check_place(self) -> None:
        """Refuses a file that was moved or deleted: it can still be written, but would be lost."""
        try:
            # The open file is compared with what its path leads to.
            if os.path.samestat(os.fstat(self._file.fileno()), self._local.stat()):
                return
        except OSError:
            pass
        raise UserError(
            f"{self._path} was moved, replaced or deleted while the run wrote it; put its folder "
            "back and start the same command again, or start it with another --workdir"
        )

    def close(self) -> None:
        """Closes the file, which uploads it; it may be closed already."""
        self.flush()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        if self._upload is not None:
            self._upload.close()
