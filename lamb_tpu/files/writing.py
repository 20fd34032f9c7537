"""Writes files; raises a one-sentence UserError if a disk is full or read-only, or a folder is deleted."""

import contextlib
import errno
import io
import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading
from lamb_tpu.files.uploads import Upload

_AGAIN = "then start the same command again: it resumes from the last checkpoint"
# Messages of the C library; `reason` searches for them in TensorStore's errors, which are text.
_KNOWN = [
    os.strerror(getattr(errno, name))
    for name in (
        "ENOSPC EDQUOT EFBIG EROFS EACCES EPERM EIO ESTALE EMFILE ENFILE ENOTCONN ENOTDIR ENOENT"
    ).split()
]


def reason(error: BaseException) -> str:
    """Returns the cause of a failed write in a few words, such as 'No space left on device'."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    for known in _KNOWN:
        if known in text:
            return known
    # TensorStore's errors for a bucket begin with a code; gcsfs's errors have only a URL.
    if "NOT_FOUND" in text or isinstance(error, FileNotFoundError):
        return "the bucket or an object in it does not exist"
    if buckets.is_unavailable(error):
        return buckets.reason(error)
    if "PERMISSION_DENIED" in text or "Forbidden" in text:
        return "no permission"
    return f"{type(error).__name__}: {text[:200]}"


@contextlib.contextmanager
def checked(path: str | os.PathLike[str], flag: str = "") -> Iterator[None]:
    """Turns an OSError raised in the block, which writes `path`, into a one-sentence UserError.

    `flag` is the flag that names the path, such as '--out'; '' for a file of a run.
    """
    try:
        yield
    except OSError as error:
        again = f"{repair(path)}, {_AGAIN}"
        name, advice = (f"{flag} {path}", "give another path") if flag else (path, again)
        raise UserError(name, ..., f"cannot be written ({reason(error)})", advice) from None


def repair(path: str | os.PathLike[str]) -> str:
    """Returns what the user must do before a write to a path can succeed."""
    if buckets.is_remote(path):
        return "make the bucket writable"
    return "free space or repair the disk"


def replace(path: pathlib.Path, data: str | bytes, flag: str = "") -> None:
    """Writes a file by an atomic rename: if the process is killed, the old or the new file remains.

    An existing file's permissions do not change. If `path` is a symbolic link, the link's target is
    written; a missing target is created if its folder exists. An object in a bucket is written by one
    atomic request. Text becomes UTF-8 with unchanged line ends; a lone surrogate, which JSON can hold
    but UTF-8 cannot, is written as its escape. `flag`: see `checked`.
    """
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    with checked(path, flag):
        if buckets.is_remote(path):
            buckets.write(path, content)
            return
        target, before = _target(path, flag)
        with _temporary(target, before) as file:
            while content:  # an unbuffered write may be partial
                content = content[file.write(content) :]
            os.fsync(file.fileno())
            os.replace(file.name, target)
        _sync_folder(target.parent)


def check_target(path: str | pathlib.Path, flag: str = "", parents: bool = False) -> pathlib.Path:
    """Checks that `replace` can write a file, before the content is computed; returns the path.

    Args:
      path: the file, which may be missing. In a str, `~` is expanded.
      flag: see `checked`.
      parents: whether the folder of the file may be missing, because the caller creates it later.
    """
    if isinstance(path, str):
        path = buckets.local(path, flag or "the path")
    if buckets.is_remote(path):
        return path
    with checked(path, flag):
        target, before = _target(path, flag)
        if not target.parent.exists():
            if parents:
                _try_existing(target.parent)
                return path
            problem = f"cannot be written, because the folder {target.parent} is missing"
            raise UserError(f"{flag} {path}".strip(), ..., problem, "make it, or give another path")
        # On a full disk an empty file can be created, but not filled.
        with _temporary(target, before) as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
    return path


def check_folder(folder: str | pathlib.Path, flag: str = "") -> pathlib.Path:
    """Checks that files can be written into a folder, which may be missing; returns the folder."""
    if isinstance(folder, str):
        folder = buckets.local(folder, flag or "the folder")
    if buckets.is_remote(folder):
        return folder
    with checked(folder, flag):
        _try_existing(folder)
    return folder


@contextlib.contextmanager
def complete_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder, which is renamed to `folder` at the end of the block.

    `folder` must be missing or empty, and stays so if the process is killed, so that the same command
    can start again. A folder in a bucket is written directly.
    """
    if buckets.is_remote(folder):
        yield folder
        return
    target = folder.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".lamb_tpu-{secrets.token_hex(8)}.tmp")
    scratch.mkdir()
    try:
        yield scratch
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _try_existing(folder: pathlib.Path) -> None:
    """Tries to write into a folder or, if it is missing, into its nearest existing parent."""
    nearest = folder.absolute()
    # A dangling link is not a missing folder: `mkdir` fails on it.
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    try_out(nearest)


def _target(path: pathlib.Path, flag: str) -> tuple[pathlib.Path, os.stat_result | None]:
    """Returns the file that a path resolves to, and the file's status (None if it is missing)."""
    try:
        kind = reading.kind(path)
        target = pathlib.Path(os.path.realpath(path))
    except ValueError as error:  # the name is invalid: it has a NUL
        raise OSError(errno.EINVAL, str(error)) from None
    if kind is None:
        return target, None
    if kind != "a file":
        problem = f"is {kind}, not a file"
        raise UserError(f"{flag} {path}".strip(), ..., problem, "give the path of a regular file")
    if not os.access(path, os.W_OK):
        # A rename would replace even a read-only file, so check the permission here.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target, os.stat(path)


@contextlib.contextmanager
def _temporary(target: pathlib.Path, before: os.stat_result | None) -> Iterator[io.FileIO]:
    """Creates a file next to `target`, with the same owner and permissions.

    On exit, removes the file unless it was renamed.
    """
    # Use the same folder, because a rename is atomic only within a file system. Do not derive the name
    # from the target's name, which may have the maximum length.
    path = target.with_name(f".lamb_tpu-{secrets.token_hex(8)}.tmp")
    # O_EXCL and O_NOFOLLOW: never opens another user's file or a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    mode = 0o666 if before is None else stat.S_IMODE(before.st_mode)
    with open(path, "wb", buffering=0, opener=lambda name, _: os.open(name, flags, mode)) as file:
        try:
            if before is not None:
                with contextlib.suppress(OSError):  # only root may change the owner
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), mode)  # the mode above is subject to the umask
            yield file
        finally:
            with contextlib.suppress(OSError):  # it was renamed
                path.unlink()


def _sync(file: io.FileIO) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        # A device or a pipe has nothing to sync.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes a rename in a folder survive a power failure, if the file system supports it."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def try_out(folder: pathlib.Path) -> None:
    """Tests that a folder is writable: writes, syncs, renames and removes a small file in it."""
    # Use a random name: several processes may do this at once, and no other user can guess the name.
    first = folder / f".write-probe-{secrets.token_hex(8)}"
    if buckets.is_remote(folder):
        buckets.write(first, bytes(4096))
        buckets.remove(first)
        return
    second = first.with_name(first.name + "-renamed")
    try:
        with first.open("xb") as file:
            file.write(bytes(4096))
            file.flush()
            # Without this, the bytes may only be cached, and a full disk would be noticed later.
            os.fsync(file.fileno())
        first.rename(second)
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                path.unlink()


class LineFile:
    """A text file to which complete lines are appended; killing the process loses no line.

    A power failure may lose lines since the last `flush`. In a bucket, a kill may lose lines too, see
    `uploads.Upload`. If a line cannot be written, or the file was moved or deleted, `failed` is called
    once with a UserError, and later lines are dropped. If `failed` is None, the error is raised.
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
            self._local, is_new = path, not path.exists()
            # Unbuffered: otherwise `close` would try again to write a line that a full disk rejected.
            self._file = path.open("ab", buffering=0)
            if is_new and self._upload is None:
                _sync_folder(path.parent)

    def write(self, line: str) -> None:
        if self._file.closed:
            return
        data = f"{line}\n".encode()
        try:
            self._check_not_moved()
            with checked(self._path):
                # An unbuffered write may be partial.
                while data:
                    data = data[self._file.write(data) :]
                if self._upload is not None:
                    self._upload.when_due()
        except UserError as error:
            self._fail(error)

    def flush(self) -> None:
        """Syncs all lines, so that they survive a power failure; for a bucket, uploads new lines."""
        if self._file.closed:
            return
        try:
            with checked(self._path):
                if self._upload is not None:
                    self._upload.now()
                else:
                    _sync(self._file)
        except UserError as error:
            self._fail(error)

    def _fail(self, error: UserError) -> None:
        self._close()
        if self._failed is None:
            raise error
        self._failed(error)

    def _check_not_moved(self) -> None:
        """Rejects a file that was moved or deleted: writes would succeed, but be lost."""
        try:
            # Compare the open file with the file at its path.
            if os.path.samestat(os.fstat(self._file.fileno()), self._local.stat()):
                return
        except OSError:
            pass
        raise UserError(
            self._path,
            ...,
            "was moved, replaced or deleted while the run was writing to it",
            "put its folder back and start the same command again, or start it with another --workdir",
        )

    def close(self) -> None:
        """Flushes and closes the file; does nothing if it is closed already."""
        self.flush()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        if self._upload is not None:
            self._upload.close()
