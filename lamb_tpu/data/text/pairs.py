"""German and English sentences: Multi30k's original files, and WMT'16 as prepared by TFDS."""

import gzip
import itertools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from lamb_tpu.data.hashing import sha256
from lamb_tpu.errors import UserError, unreadable

LANGUAGES = ("de", "en")  # languages of the source and of the target
_WMT16 = "wmt16_translate/de-en"
_READ_CHUNK = 1024
_MULTI30K = (
    "https://github.com/multi30k/dataset/raw/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/"
    "raw"
)
# Split -> beginning of its files' names.
_STEMS = {
    "train": "train",
    "validation": "val",
    "test": "test_2016_flickr",
    "test_2017": "test_2017_flickr",
}
# File -> sha256.
_SUMS = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2017_flickr.de.gz": "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee",
    "test_2017_flickr.en.gz": "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074",
}


class Pair(NamedTuple):
    """A sentence and its translation, each one line of text."""

    source: str
    target: str


class Multi30k:
    """The original files of Multi30k, German to English: Elliott et al., arXiv:1605.00459.

    The split `test` is the flickr test set of 2016. See also `parallel.Corpus`.
    """

    def __init__(self, folder: str | None) -> None:
        if folder is None:
            remedy = f"give the folder of the original files, such as train.de.gz from {_MULTI30K}"
            raise UserError("config.data.dir", ..., "is missing", remedy)
        self.splits = tuple(_STEMS)
        self.sums = dict(_SUMS)
        self._folder = pathlib.Path(folder)
        for name, expected in self.sums.items():
            path, url = self._folder / name, f"{_MULTI30K}/{name}"
            try:
                actual = sha256(path)
            except (OSError, ValueError) as error:
                raise unreadable(path, error, f"get it from {url}") from error
            if actual != expected:
                problem = f"has sha256 {actual}, not {expected}, which data set multi30k needs"
                raise UserError(path, ..., problem, f"get it again from {url}")

    def read(self, split: str) -> Iterator[Pair]:
        """Yields the pairs of a split, in order."""
        texts = [
            gzip.decompress((self._folder / f"{_STEMS[split]}.{language}.gz").read_bytes()).decode()
            for language in LANGUAGES
        ]
        # Only "\n" ends a line, because a sentence may contain another Unicode line separator.
        lines = [text.removesuffix("\n").split("\n") for text in texts]
        yield from itertools.starmap(Pair, zip(*lines, strict=True))


class Wmt16:
    """The news translation task of WMT'16, German to English, as TFDS prepares it.

    The split `test` is newstest2016. See also `parallel.Corpus`.
    """

    def __init__(self, data_dir: str | None) -> None:
        # Imported here, because the other sets do not need TFDS.
        import tensorflow_datasets as tfds

        from lamb_tpu.data.prepare import is_prepared

        try:
            self._builder = tfds.builder(_WMT16, data_dir=data_dir)
            prepared = is_prepared(self._builder)
        # Without TensorFlow, TFDS finds only prepared sets.
        except tfds.core.DatasetNotFoundError:
            prepared = False
        if not prepared:
            problem = f"is not prepared in {data_dir or tfds.core.constants.DATA_DIR}"
            remedy = (
                f"prepare it with tfds.builder({_WMT16!r}, data_dir=DIR, file_format='array_record')"
                ".download_and_prepare(), and give --config.data.prepared_dir=DIR"
            )
            raise UserError("data set wmt16", ..., problem, remedy)
        infos = self._builder.info.splits
        self.splits = tuple(infos)
        # TFDS verifies the downloads, so sizes suffice to detect a set that was prepared differently.
        self.sums = {
            split: f"{info.num_examples} examples, {info.num_bytes} bytes"
            for split, info in infos.items()
        }

    def read(self, split: str) -> Iterator[Pair]:
        """Yields the pairs of a split, in order."""
        try:
            records = self._builder.as_data_source(split=split)
        except NotImplementedError as error:
            key = f"{self._builder.data_dir} of data set wmt16"
            file_format = self._builder.info.file_format.value
            problem = f"is prepared as {file_format}, which cannot be read by index"
            remedy = "prepare it as array_record in another folder"
            raise UserError(key, ..., problem, remedy) from error
        for start in range(0, len(records), _READ_CHUNK):
            stop = min(start + _READ_CHUNK, len(records))
            for record in records.__getitems__(list(range(start, stop))):
                texts = (record[language] for language in LANGUAGES)
                yield Pair(*(text.decode() if isinstance(text, bytes) else text for text in texts))
