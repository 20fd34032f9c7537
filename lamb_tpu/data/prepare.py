"""Preparation of a data set: from original files to ArrayRecord files."""

import contextlib
import pathlib
import queue
import threading
import urllib.request
from collections.abc import Iterator

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums, resource
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from lamb_tpu.errors import UserError
from lamb_tpu.files import locks

_REACH_SECONDS = 5.0


def prepare(builder: tfds.core.DatasetBuilder, source_dir: str | None) -> None:
    """Prepares the builder's data set unless it is prepared already.

    TFDS writes into a temporary folder and renames it at the end, so an interrupted preparation
    leaves no incomplete data set. If several processes call this function at once, one prepares the
    set and the others wait. `source_dir` has the original files under their original names; None
    downloads them. Raises a UserError if a file is missing or changed, or the server is unreachable.
    """
    if is_prepared(builder):
        return
    if source_dir is not None:
        _check_files(builder, pathlib.Path(source_dir))
    with _one_at_a_time(builder):
        # Another process may have prepared the set while this one waited.
        if is_prepared(builder):
            return
        if builder.data_path.exists():
            problem = "has no dataset_info.json"
            remedy = "delete the folder and prepare the set again"
            raise UserError(f"{builder.data_dir} of data set {builder.name}", ..., problem, remedy)
        if source_dir is None:
            _check_reachable(builder)
        # Verifies checksums, and prepares the set instead of copying a prepared set from Google's
        # bucket.
        config = tfds.download.DownloadConfig(
            manual_dir=source_dir, force_checksums_validation=True, try_download_gcs=False
        )
        try:
            builder.download_and_prepare(download_config=config, file_format="array_record")
        except (tfds.download.DownloadError, NonMatchingChecksumError) as error:
            key = f"the download of data set {builder.name}"
            raise UserError(key, ..., f"failed ({error})", _give_folder(builder)) from error


def is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    # Checks first that the folder exists, because TFDS logs a warning if it is missing.
    return builder.data_path.exists() and builder.is_prepared()


def _check_files(builder: tfds.core.DatasetBuilder, folder: pathlib.Path) -> None:
    for url, expected in builder.url_infos.items():
        path = folder / expected.filename
        if not path.is_file():
            problem = f"is missing, but data set {builder.name} needs it"
            raise UserError(path, ..., problem, f"get it from {url}")
        actual = checksums.compute_url_info(path)
        if actual.checksum != expected.checksum:
            has, needs = (
                f"{info.checksum} ({int(info.size):,} bytes)" for info in (actual, expected)
            )
            problem = f"has sha256 {has}, not {needs}, which data set {builder.name} needs"
            raise UserError(path, ..., problem, f"get it again from {url}")


def _check_reachable(builder: tfds.core.DatasetBuilder) -> None:
    """Raises a UserError within seconds if the server is unreachable; TFDS would retry for minutes."""
    url = next((url for url in builder.url_infos if not _is_downloaded(builder, url)), None)
    if url is None:
        return
    outcome: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def open_url() -> None:
        try:
            urllib.request.urlopen(url, timeout=_REACH_SECONDS).close()
            outcome.put(None)
        except OSError as error:
            outcome.put(str(error))

    # Looking up a host name has no timeout, so this runs in a thread; a daemon thread does not keep
    # the process alive while it hangs.
    threading.Thread(target=open_url, daemon=True).start()
    try:
        failure = outcome.get(timeout=_REACH_SECONDS)
    except queue.Empty:
        failure = f"no answer in {_REACH_SECONDS:.0f} s"
    if failure is not None:
        problem = f"is not prepared in {builder.data_dir}, and {url} cannot be reached ({failure})"
        raise UserError(f"data set {builder.name}", ..., problem, _give_folder(builder))


def _is_downloaded(builder: tfds.core.DatasetBuilder, url: str) -> bool:
    # `data_dir` is FOLDER/NAME/VERSION, and TFDS stores downloads in FOLDER/downloads.
    downloads = pathlib.Path(builder.data_dir).parents[1] / "downloads"
    file_name = resource.get_dl_fname(url, builder.url_infos[url].checksum)
    return any((folder / file_name).exists() for folder in (downloads / builder.name, downloads))


def _give_folder(builder: tfds.core.DatasetBuilder) -> str:
    names = ", ".join(info.filename for info in builder.url_infos.values())
    return f"give --config.data.dir=FOLDER, a folder with the original files ({names})"


@contextlib.contextmanager
def _one_at_a_time(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
    """Holds a lock next to the data set; the system releases it even if the process is killed."""
    # Files in a bucket cannot be locked.
    if "://" in str(builder.data_dir):
        problem = f"is not prepared in {builder.data_dir}"
        remedy = "prepare it in a local or mounted folder"
        raise UserError(f"data set {builder.name}", ..., problem, remedy)
    folder = pathlib.Path(builder.data_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    with locks.hold(folder / ".preparing"):
        yield
