"""Paths and objects in a bucket of Google Cloud Storage, written gs://BUCKET/FOLDER.

Such a path is an `etils.epath.Path`, which has those methods of `pathlib.Path` that need no file
system of this machine. A write replaces an object whole, and a reader sees the old or the new one.
There is no appending and no renaming, and a folder is only a common beginning of names.
"""

import binascii
import contextlib
import errno
import functools
import importlib.util
import json
import logging
import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any, cast

from lamb_tpu.errors import UserError

PREFIX = "gs://"
_ROLES = "roles/storage.objectUser and roles/storage.legacyBucketReader"


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL."""
    # pathlib, which makes one slash of two, would take a URL for a relative path.
    return "://" in os.fspath(path)


def parse(path: str | os.PathLike[str], key: str) -> pathlib.Path:
    """Returns an absolute path of this machine, or one in a bucket; nothing is read.

    Args:
      path: the path as a user gave it.
      key: the flag or config key that names it, for messages.

    Raises:
      UserError: it is a URL of another kind, names no folder of a bucket, has a character that
        clients take for a pattern, or the library for buckets is missing.
    """
    text = os.fspath(path)
    if not is_remote(text):
        return pathlib.Path(text).expanduser().absolute()
    if not text.startswith(PREFIX):
        raise UserError(
            f"{key} {text} is remote; give a local or mounted folder, or gs://BUCKET/FOLDER"
        )
    bucket, _, folder = text.removeprefix(PREFIX).partition("/")
    if not bucket or not folder.strip("/"):
        raise UserError(f"{key} {text} names no folder of a bucket; give gs://BUCKET/FOLDER")
    if re.search(r"[\[\]*?#]|(^|/)\.\.(/|$)", folder):
        raise UserError(f"{key} {text} has '..' or one of [ ] * ? #; give a folder without them")
    if not _is_installed():
        raise UserError(f"{key} {text} needs gcsfs, which is not installed: pip install gcsfs")
    _prepare()
    from etils import epath

    return cast(pathlib.Path, epath.Path(text.rstrip("/")))


def local(path: str | os.PathLike[str], key: str) -> pathlib.Path:
    """Returns a path of this machine, whose `~` is expanded.

    Args:
      path: the path as a user gave it.
      key: the flag that names it, for messages.

    Raises:
      UserError: it is a URL.
    """
    if is_remote(path):
        raise UserError(f"{key} {os.fspath(path)} is remote; give a path of this machine")
    return pathlib.Path(path).expanduser()


def _is_installed() -> bool:
    try:
        return all(
            importlib.util.find_spec(name) is not None
            # Orbax needs the second one, which gcsfs brings.
            for name in ("gcsfs", "google.cloud.storage")
        )
    except ModuleNotFoundError:  # not even google.cloud is there
        return False


@functools.cache
def _prepare() -> None:
    """Sets up the client libraries, before etils.epath first uses them."""
    import fsspec

    # TensorStore and other machines write into the same folders, of which gcsfs would not learn.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    # Plain requests serve all kinds of buckets but zonal ones.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # epath prefers TensorFlow where it is installed.
    os.environ.setdefault("EPATH_USE_TF", "false")
    warnings.filterwarnings("ignore", "GCS project not set")  # nothing here needs one
    # It logs with a traceback what it also raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)


def client() -> Any:
    """Returns a `google.cloud.storage.Client`, for what epath lacks."""
    from google.cloud import storage

    return storage.Client()


def split(path: pathlib.Path) -> tuple[str, str]:
    """Returns the bucket of a path, and the object's name in it."""
    bucket, _, name = os.fspath(path).removeprefix(PREFIX).partition("/")
    return bucket, name


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors of the client libraries into an OSError whose strerror is a short reason.

    FileNotFoundError and FileExistsError stay as they are.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:
        if not is_error(error):
            raise
        raise OSError(errno.EIO, reason(error)) from error


def is_error(error: Exception) -> bool:
    """Returns whether an error may come from a client library."""
    # Their errors have no common class but Exception, and some are of libraries that they use.
    rooms = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(rooms & {"aiohttp", "gcsfs", "google", "requests"})


def reason(error: BaseException) -> str:
    """Returns the reason of a client's error in a few words."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "Credentials" in type(error).__name__:
        return "no credentials are there, which gcloud auth application-default login makes"
    if told := re.search(r'"message": *"([^"]+)"', text):
        text = told[1]
    # gcsfs says 'Forbidden: URL MESSAGE', google-cloud-storage '403 GET URL: MESSAGE'.
    text = re.sub(r"^(Forbidden: \S+ |\d{3} [A-Z]+ \S+: )", "", text)
    if getattr(error, "code", None) == 403 or str(error).startswith("Forbidden"):
        return f"no permission: {text[:200]}"
    return f"{type(error).__name__}: {text[:200]}"


def check(path: pathlib.Path, key: str) -> None:
    """Checks that the bucket of a path exists and may be read.

    Args:
      path: a path in a bucket.
      key: the flag or config key that names it.

    Raises:
      UserError: it does not exist or does not answer, or this machine's account may not read it.
    """
    bucket, name = split(path)
    try:
        with plain_errors():
            storage = client()
            if storage.lookup_bucket(bucket) is None:
                raise UserError(
                    f"{key} {path}: there is no bucket {bucket}; make it with gcloud storage "
                    f"buckets create {PREFIX}{bucket}, or give another folder"
                )
            next(iter(storage.list_blobs(bucket, prefix=f"{name}/", max_results=1)), None)
    except OSError as error:
        told, advice = reason(error), "try again when it answers, or give another folder"
        if told.startswith("no permission"):
            advice = f"give this machine's account the roles {_ROLES} on the bucket"
        raise UserError(f"{key} {path} cannot be read ({told}); {advice}") from None


def read(path: pathlib.Path) -> bytes:
    """Returns an object's bytes.

    Raises:
      FileNotFoundError: there is no such object.
      OSError: it cannot be read.
    """
    with plain_errors():
        return path.read_bytes()


def write(path: pathlib.Path, data: bytes) -> None:
    """Writes an object whole.

    Raises:
      OSError: it cannot be written; a former one is left.
    """
    with plain_errors():
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            raise OSError(errno.ENOENT, f"there is no bucket {split(path)[0]}") from None


def remove(path: pathlib.Path) -> None:
    """Removes an object, or all objects of a folder; there may be none."""
    with plain_errors(), contextlib.suppress(FileNotFoundError):
        cast(Any, path).rmtree()


def children(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns objects and folders in a folder; none if it is missing."""
    with plain_errors(), contextlib.suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def kind(path: pathlib.Path) -> str | None:
    """Returns 'a file' or 'a folder', or None if nothing is there."""
    with plain_errors():
        if path.is_dir():
            return "a folder"
        return "a file" if path.exists() else None


def sums(folder: pathlib.Path) -> dict[str, str | None]:
    """Returns the MD5 that the bucket has computed of every object below a folder, by its name.

    It has none, so that it is None here, of an object that was composed of several.
    """
    bucket, name = split(folder)
    with plain_errors():
        return {
            blob.name.removeprefix(f"{name}/"): blob.md5_hash and _hexadecimal(blob.md5_hash)
            for blob in client().list_blobs(bucket, prefix=f"{name}/")
        }


def _hexadecimal(base64: str) -> str:
    return binascii.a2b_base64(base64).hex()


def parse_json(data: bytes) -> Any:
    """Returns an object's JSON; None if it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return None
