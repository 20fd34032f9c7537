"""Preparation of a data set, once: from original files to ArrayRecord files."""

import contextlib
import pathlib
import queue
import threading
import urllib.request
from collections.abc import Iterator

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums, resource

from lamb_tpu.errors import UserError
from lamb_tpu.files import locks

_REACH_SECONDS = 5.0


def prepare(builder: tfds.core.DatasetBuilder, source_dir: str | None) -> None:
    """Prepares the builder's data set unless it is already prepared.

    TFDS writes into a temporary folder and renames it at the end, so an interrupted preparation
    leaves no data set behind. Several processes may call this at once: one prepares, and the others
    wait.

    Args:
      builder: one of `builders.BUILDERS`.
      source_dir: folder with the original files under their original names, each checked by size
        and sha256; None downloads them.

    Raises:
      UserError: a file is missing or is not the original, or the network cannot be reached.
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
            raise UserError(
                f"data set {builder.name}: {builder.data_dir} is no prepared set, for it has no "
                "dataset_info.json; delete it and prepare the set again"
            )
        if source_dir is None:
            _check_reachable(builder)
        # Checksums are verified, and the set is made of the original files, not fetched ready-made
        # from Google's bucket.
        config = tfds.download.DownloadConfig(
            manual_dir=source_dir, force_checksums_validation=True, try_download_gcs=False
        )
        try:
            builder.download_and_prepare(download_config=config, file_format="array_record")
        except (tfds.download.DownloadError, tfds.download.NonMatchingChecksumError) as error:
            raise UserError(
                f"data set {builder.name}: the download failed ({error}); {_give_folder(builder)}"
            ) from error


def is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    # TFDS logs a warning about a missing folder, so existence is checked first.
    return builder.data_path.exists() and builder.is_prepared()


def _check_files(builder: tfds.core.DatasetBuilder, folder: pathlib.Path) -> None:
    for url, expected in builder.url_infos.items():
        path = folder / expected.filename
        if not path.is_file():
            raise UserError(
                f"data set {builder.name}: {expected.filename} is missing in {folder}; "
                f"get it from {url}"
            )
        found = checksums.compute_url_info(path)
        if found.checksum != expected.checksum:
            raise UserError(
                f"data set {builder.name}: {path} is not the original file: it has sha256 "
                f"{found.checksum} ({int(found.size):,} bytes), expected {expected.checksum} "
                f"({int(expected.size):,} bytes); get it again from {url}"
            )


def _check_reachable(builder: tfds.core.DatasetBuilder) -> None:
    """Refuses an unreachable server within seconds; TFDS would retry for minutes."""
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

    # In a thread, because the look-up of a host name has no timeout.
    # A daemon thread, which does not keep the process alive while it hangs.
    threading.Thread(target=open_url, daemon=True).start()
    try:
        failure = outcome.get(timeout=_REACH_SECONDS)
    except queue.Empty:
        failure = f"no answer in {_REACH_SECONDS:.0f} s"
    if failure is not None:
        raise UserError(
            f"data set {builder.name} is not prepared in {builder.data_dir}, and {url} cannot be "
            f"reached ({failure}); {_give_folder(builder)}"
        )


def _is_downloaded(builder: tfds.core.DatasetBuilder, url: str) -> bool:
    # `data_dir` is FOLDER/NAME/VERSION, and TFDS keeps files in FOLDER/downloads.
    downloads = pathlib.Path(builder.data_dir).parents[1] / "downloads"
    file_name = resource.get_dl_fname(url, builder.url_infos[url].checksum)
    return any((folder / file_name).exists() for folder in (downloads / builder.name, downloads))


def _give_folder(builder: tfds.core.DatasetBuilder) -> str:
    names = ", ".join(info.filename for info in builder.url_infos.values())
    return f"give --config.data.dir=FOLDER, a folder with the original files ({names})"


@contextlib.contextmanager
def _one_at_a_time(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
    """Holds a lock file beside the data set; the system frees it even if the process is killed."""
    # A bucket has no locks.
    if "://" in str(builder.data_dir):
        raise UserError(
            f"data set {builder.name} is not prepared in {builder.data_dir}, and can be prepared "
            "in a local or mounted folder only"
        )
    folder = pathlib.Path(builder.data_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    with locks.hold(folder / ".preparing"):
        yield
