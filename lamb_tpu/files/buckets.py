"""Paths and objects in a bucket of Google Cloud Storage, written gs://BUCKET/FOLDER.

Such a path is an `etils.epath.Path`, which has the methods of `pathlib.Path` that need no local
file system. A write replaces the full object: a reader sees either the old or the new object.
Objects cannot be appended to or renamed. A folder is only a common prefix of object names.
"""

import binascii
import contextlib
import errno
import functools
import importlib.util
import json
import logging
import math
import os
import pathlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, cast

from lamb_tpu import terminal
from lamb_tpu.errors import UserError

PREFIX = "gs://"
# A bucket that does not answer is reported after REPORT_SECONDS, then at each interval. Requests
# are repeated for about GIVE_UP_SECONDS, then they fail.
REPORT_SECONDS, _INTERVAL_SECONDS, GIVE_UP_SECONDS = 10.0, 30.0, 100.0
_REQUEST_SECONDS = 10.0  # time without a received byte, after which a request is repeated
# After `give_up`, requests to the bucket fail at once for this time: otherwise a run that ends would
# wait for the bucket once for each file.
_REST_SECONDS = 60.0
SILENT = "the bucket does not answer"
# IAM roles: the first allows reading and writing objects, the second looking up the bucket itself.
ROLES = ("roles/storage.objectUser", "roles/storage.legacyBucketReader")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL."""
    # pathlib collapses the two slashes of a URL, which would then look like a relative path.
    return "://" in os.fspath(path)


def parse(path: str | os.PathLike[str], key: str) -> pathlib.Path:
    """Converts a path to an absolute path on this machine, or to a path in a bucket; reads nothing.

    `key` is the flag or config key that names the path, for messages. Raises a UserError if a URL is
    not a valid gs://BUCKET/FOLDER, or if the client library for buckets is missing.
    """
    text = os.fspath(path)
    if not is_remote(text):
        return _expanded(text, key).absolute()
    check_folder(text, key)
    if not _is_installed():
        problem = "needs gcsfs, which is not installed"
        raise UserError(f"{key} {text}", ..., problem, "run pip install gcsfs")
    _prepare()
    from etils import epath

    return cast(pathlib.Path, epath.Path(text.rstrip("/")))


def check_folder(text: str, key: str) -> None:
    """Rejects a URL that is not a valid gs://BUCKET/FOLDER; needs no client library."""
    if not text.startswith(PREFIX):
        remedy = "give a local or mounted folder, or gs://BUCKET/FOLDER"
        raise UserError(f"{key} {text}", ..., "has an unsupported URL scheme", remedy)
    bucket, _, folder = text.removeprefix(PREFIX).partition("/")
    if not bucket or not folder.strip("/"):
        problem = "names no folder in a bucket"
        raise UserError(f"{key} {text}", ..., problem, "give gs://BUCKET/FOLDER")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", bucket, re.ASCII) or ".." in bucket:
        problem = f"has the invalid bucket name {bucket!r}"
        raise UserError(f"{key} {text}", ..., problem, "use a name of letters, digits and . _ -")
    if re.search(r"[\[\]*?#]|(^|/)\.\.?(/|$)", folder):
        problem = "has '..', '.' or one of [ ] * ? #"
        raise UserError(f"{key} {text}", ..., problem, "give a folder without them")


def local(path: str | os.PathLike[str], key: str) -> pathlib.Path:
    """Returns a path on this machine with `~` expanded; rejects URLs."""
    if is_remote(path):
        raise UserError(f"{key} {os.fspath(path)}", ..., "is remote", "give a local path")
    return _expanded(path, key)


def _expanded(path: str | os.PathLike[str], key: str) -> pathlib.Path:
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        problem = "begins with an unknown home folder"
        raise UserError(f"{key} {os.fspath(path)}", ..., problem, "give its full path") from None


def _is_installed() -> bool:
    try:
        return all(
            importlib.util.find_spec(name) is not None
            # Orbax needs google.cloud.storage, which gcsfs installs.
            for name in ("gcsfs", "google.cloud.storage")
        )
    except ModuleNotFoundError:  # google.cloud is missing too
        return False


@functools.cache
def _prepare() -> None:
    """Configures the client libraries; called before etils.epath is first used."""
    import fsspec

    # A cached listing would miss files that TensorStore or other machines write into the same folders.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    # By default a request waits 5 minutes for an answer, and is repeated up to six times.
    import aiohttp

    fsspec.config.conf["gcs"].setdefault(
        "requests_timeout",
        aiohttp.ClientTimeout(
            total=None, sock_connect=_REQUEST_SECONDS, sock_read=_REQUEST_SECONDS
        ),
    )
    # By default TensorStore, which writes the arrays, waits forever.
    for name, value in (
        ("CONNECT_TIMEOUT_SECONDS", _REQUEST_SECONDS),
        ("LOW_SPEED_TIME_SECONDS", _REQUEST_SECONDS),
        ("LOW_SPEED_LIMIT_BYTES", 1),
    ):
        os.environ.setdefault(f"TENSORSTORE_CURL_{name}", f"{value:.0f}")
    # Plain requests work for all types of buckets except zonal buckets.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # By default epath uses TensorFlow if it is installed.
    os.environ.setdefault("EPATH_USE_TF", "false")
    warnings.filterwarnings("ignore", "GCS project not set")  # no project is needed
    # These loggers (gcsfs uses asyncio) print a traceback for errors that are also raised.
    for name in ("gcsfs", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def patience() -> dict[str, Any]:
    """Returns the timeout and retry arguments for requests of the client that `client` returns."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": _REQUEST_SECONDS, "retry": DEFAULT_RETRY.with_timeout(GIVE_UP_SECONDS)}


def client() -> Any:
    """Returns a `google.cloud.storage.Client`, for operations that epath lacks."""
    from google.cloud import storage

    return storage.Client()


def split(path: pathlib.Path) -> tuple[str, str]:
    """Returns a path's bucket, and the name of the object in this bucket."""
    bucket, _, name = os.fspath(path).removeprefix(PREFIX).partition("/")
    return bucket, name


@contextlib.contextmanager
def plain_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of the client libraries into an OSError whose strerror is a short reason.

    FileNotFoundError and FileExistsError are not changed. If the bucket does not answer, prints a
    report on stderr while the block waits. For one minute after `give_up`, every block for the same
    bucket fails at once.
    """
    bucket = split(path)[0]
    if time.monotonic() < _given_up.get(bucket, -math.inf):
        raise OSError(errno.EIO, "the bucket did not answer a moment ago")
    began = time.monotonic()
    try:
        with reporting(f"{path} does not answer", f"giving up after {GIVE_UP_SECONDS:.0f} s"):
            yield
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:
        if not is_error(error):
            raise
        # Only the main thread may give up: a thread that renews a lock must not stop the run's own
        # requests.
        in_run = threading.current_thread() is threading.main_thread()
        if in_run and time.monotonic() - began > REPORT_SECONDS:
            give_up(path)
        raise OSError(errno.EIO, reason(error)) from error


# Bucket -> the time until which requests to it fail at once.
_given_up: dict[str, float] = {}


def give_up(path: pathlib.Path) -> None:
    """Makes all requests to a path's bucket fail at once during the next minute."""
    _given_up[split(path)[0]] = time.monotonic() + _REST_SECONDS


@contextlib.contextmanager
def reporting(what: str, then: str = "") -> Iterator[None]:
    """Reports on stderr, at intervals, why the block waits (`what`) and what will happen (`then`)."""
    if getattr(_reports, "active", False):  # an enclosing block reports already
        yield
        return
    over, began = threading.Event(), time.monotonic()

    def report() -> None:
        pause = REPORT_SECONDS
        while not over.wait(pause):
            pause = _INTERVAL_SECONDS
            waited = f"{what}; waiting for {time.monotonic() - began:.0f} s"
            text = f"{waited}, {then}" if then else waited
            # A single write, because other threads may report too.
            sys.stderr.write(f"{terminal.fit(text)}\n")
            sys.stderr.flush()

    thread = threading.Thread(target=report, name="waiting", daemon=True)
    thread.start()
    _reports.active = True
    try:
        yield
    finally:
        _reports.active = False
        over.set()
        thread.join()


_reports = threading.local()


def is_error(error: Exception) -> bool:
    """Returns whether an error may come from a client library."""
    # The libraries' errors share no base class but Exception, and some come from their dependencies.
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(packages & {"aiohttp", "gcsfs", "google", "requests"})


def reason(error: BaseException) -> str:
    """Returns the reason for a client library's error in a few words."""
    text = " ".join(str(error).split())
    # google.api_core wraps the error of the last attempt.
    if isinstance(cause := getattr(error, "cause", None), Exception):
        return reason(cause)
    if is_unavailable(error):
        code = getattr(error, "code", None)
        return f"the bucket answers with status {code}" if code else SILENT
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "Credentials" in type(error).__name__:
        return "there are no credentials; run gcloud auth application-default login"
    if match := re.search(r'"message": *"([^"]+)"', text):
        text = match[1]
    # gcsfs says 'Forbidden: URL MESSAGE', google-cloud-storage '403 GET URL: MESSAGE'.
    text = re.sub(r"^(Forbidden: \S+ |\d{3} [A-Z]+ \S+: )", "", text)
    if getattr(error, "code", None) == 403 or str(error).startswith("Forbidden"):
        return f"no permission: {text[:200]}"
    return f"{type(error).__name__}: {text[:200]}"


def is_unavailable(error: BaseException) -> bool:
    """Returns whether an error may be temporary: the bucket does not answer, or asks to retry."""
    if isinstance(error, TimeoutError) or type(error).__name__.endswith("Timeout"):
        return True
    # TensorStore returns its errors as text.
    if re.match("(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED):", str(error)):
        return True
    return str(getattr(error, "code", None)) in ("408", "429", "500", "501", "502", "503", "504")


def check(path: pathlib.Path, key: str) -> None:
    """Raises a UserError unless the bucket of a path exists and can be read."""
    bucket, name = split(path)
    try:
        with plain_errors(path):
            storage = client()
            if storage.lookup_bucket(bucket, **patience()) is None:
                raise UserError(
                    f"{key} {path}",
                    ...,
                    f": there is no bucket {bucket}",
                    f"create it with gcloud storage buckets create {PREFIX}{bucket}, or give another folder",
                )
            blobs = storage.list_blobs(bucket, prefix=f"{name}/", max_results=1, **patience())
            next(iter(blobs), None)
    except OSError as error:
        why, advice = reason(error), "try again later, or give another folder"
        if why.startswith("no permission"):
            advice = f"give this machine's account the roles {' and '.join(ROLES)} on the bucket"
        raise UserError(f"{key} {path}", ..., f"cannot be read ({why})", advice) from None


def read(path: pathlib.Path) -> bytes:
    """Returns an object's bytes; raises FileNotFoundError if it is missing, or OSError if reading fails."""
    with plain_errors(path):
        return path.read_bytes()


def write(path: pathlib.Path, data: bytes) -> None:
    """Writes or replaces an object; raises an OSError if the object cannot be written."""
    with plain_errors(path):
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            raise OSError(errno.ENOENT, f"there is no bucket {split(path)[0]}") from None


def remove(path: pathlib.Path) -> None:
    """Removes an object, or all objects in a folder; does nothing if there are none."""
    with plain_errors(path), contextlib.suppress(FileNotFoundError):
        cast(Any, path).rmtree()


def children(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the objects and folders in a folder; [] if the folder is missing."""
    with plain_errors(folder), contextlib.suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def kind(path: pathlib.Path) -> str | None:
    """Returns 'a file' or 'a folder', or None if nothing is there."""
    with plain_errors(path):
        if path.is_dir():
            return "a folder"
        return "a file" if path.exists() else None


def sums(folder: pathlib.Path) -> dict[str, str | None]:
    """Returns object name -> MD5, as computed by the bucket, for all objects below a folder.

    The MD5 is None for a composite object, for which the bucket computes no MD5.
    """
    bucket, name = split(folder)
    with plain_errors(folder):
        blobs = client().list_blobs(bucket, prefix=f"{name}/", **patience())
        return {
            blob.name.removeprefix(f"{name}/"): blob.md5_hash
            and binascii.a2b_base64(blob.md5_hash).hex()
            for blob in blobs
        }


def parse_json(data: bytes) -> Any:
    """Parses an object's content as JSON; returns None if the content is not valid JSON."""
    try:
        return json.loads(data)
    except ValueError:
        return None
