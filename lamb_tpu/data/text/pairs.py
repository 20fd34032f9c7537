"""Sentences in German and English: Multi30k's original files, and WMT'16 by TFDS."""

import gzip
import hashlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow_datasets as tfds

from lamb_tpu.data.prepare import is_prepared
from lamb_tpu.errors import UserError

LANGUAGES = ("de", "en")  # of the source and of the target
_WMT16 = "wmt16_translate/de-en"
_READ_CHUNK = 1024
_MULTI30K = (
    "https://github.com/multi30k/dataset/raw/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/"
    "raw"
)
# Files of each split, and their sha256.
_FILES = {
    "train": (
        "train",
        {
            "de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
            "en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
        },
    ),
    "validation": (
        "val",
        {
            "de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
            "en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
        },
    ),
    "test": (
        "test_2016_flickr",
        {
            "de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
            "en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
        },
    ),
    "test_2017": (
        "test_2017_flickr",
        {
            "de": "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee",
            "en": "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074",
        },
    ),
}


class Pair(NamedTuple):
    """A sentence and its translation, each one line of text."""

    source: str
    target: str


class Multi30k:
    """The original files of Multi30k, German to English: Elliott et al., arXiv:1605.00459.

    Attributes:
      splits: names of the splits; `test` is that of 2016, flickr.
      sums: file name -> sha256, which stand for the content.

    Raises:
      UserError: a file is missing, or is not the original.
    """

    def __init__(self, folder: str | None) -> None:
        if folder is None:
            raise UserError(
                "config.data.dir is missing; for multi30k it is the folder of the original files, "
                f"such as train.de.gz of {_MULTI30K}"
            )
        self.splits = tuple(_FILES)
        self.sums = {
            f"{stem}.{language}.gz": digest
            for stem, digests in _FILES.values()
            for language, digest in digests.items()
        }
        self._folder = pathlib.Path(folder)
        for name, expected in self.sums.items():
            path, url = self._folder / name, f"{_MULTI30K}/{name}"
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise UserError(
                    f"data set multi30k: {path} cannot be read ({error.strerror}); get it from "
                    f"{url}"
                ) from error
            if found != expected:
                raise UserError(
                    f"data set multi30k: {path} is not the original file: it has sha256 {found}, "
                    f"expected {expected}; get it again from {url}"
                )

    def read(self, split: str) -> Iterator[Pair]:
        """Yields the pairs of a split, in order."""
        stem, _ = _FILES[split]
        texts = [
            gzip.decompress((self._folder / f"{stem}.{language}.gz").read_bytes()).decode()
            for language in LANGUAGES
        ]
        # Only "\n" ends a line: a sentence may hold another of Unicode's line separators.
        lines = [text.removesuffix("\n").split("\n") for text in texts]
        yield from itertools.starmap(Pair, zip(*lines, strict=True))


class Wmt16:
    """The news translation of WMT'16, German to English, as TFDS prepares it.

    Attributes: see `Multi30k`; `test` is newstest2016.

    Raises:
      UserError: the set is not prepared, or in a format that cannot be read by index.
    """

    def __init__(self, data_dir: str | None) -> None:
        try:
            self._builder = tfds.builder(_WMT16, data_dir=data_dir)
            prepared = is_prepared(self._builder)
        # Without TensorFlow, TFDS knows only the sets that are prepared.
        except tfds.core.DatasetNotFoundError:
            prepared = False
        if not prepared:
            raise UserError(
                f"data set wmt16 is not prepared in {data_dir or tfds.core.constants.DATA_DIR}; "
                f"prepare it once with tfds.builder({_WMT16!r}, data_dir=DIR, "
                "file_format='array_record').download_and_prepare(), on a machine with "
                "TensorFlow, and give --config.data.prepared_dir=DIR"
            )
        infos = self._builder.info.splits
        self.splits = tuple(infos)
        # TFDS checks the downloads; the sizes show that a set was prepared anew.
        self.sums = {
            split: f"{info.num_examples} examples, {info.num_bytes} bytes"
            for split, info in infos.items()
        }

    def read(self, split: str) -> Iterator[Pair]:
        """Yields the pairs of a split, in order."""
        try:
            records = self._builder.as_data_source(split=split)
        except NotImplementedError as error:
            raise UserError(
                f"data set wmt16: {self._builder.data_dir} is prepared as "
                f"{self._builder.info.file_format}, which cannot be read by index; prepare it in "
                "another folder as array_record"
            ) from error
        for start in range(0, len(records), _READ_CHUNK):
            stop = min(start + _READ_CHUNK, len(records))
            for record in records.__getitems__(list(range(start, stop))):
                texts = (record[language] for language in LANGUAGES)
                yield Pair(*(text.decode() if isinstance(text, bytes) else text for text in texts))
