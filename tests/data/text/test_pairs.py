"""Reading of Multi30k's original files, and of a set prepared by TFDS."""

import pathlib
import shutil
import types
from typing import Any

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.file_adapters import FileFormat

from lamb_tpu.data import prepare
from lamb_tpu.data.text.pairs import Multi30k, Pair, Wmt16
from tests.raising import rejected
from tests.shared import shared


def test_multi30k() -> None:
    corpus = Multi30k(str(shared("data", "multi30k")))
    counts = {split: sum(1 for _ in corpus.read(split)) for split in corpus.splits}
    assert counts == {"train": 29_000, "validation": 1_014, "test": 1_000, "test_2017": 1_000}
    assert next(corpus.read("train")) == Pair(
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
        "Two young, White males are outside near many bushes.",
    )


def test_changed_file_is_rejected(tmp_path: pathlib.Path) -> None:
    for path in shared("data", "multi30k").glob("*.[de][en].gz"):
        shutil.copy(path, tmp_path / path.name)
    Multi30k(str(tmp_path))
    (tmp_path / "val.de.gz").chmod(0o644)
    (tmp_path / "val.de.gz").write_bytes((tmp_path / "val.en.gz").read_bytes())
    with rejected("*/val.de.gz", ..., "has sha256", "get it again from"):
        Multi30k(str(tmp_path))
    (tmp_path / "val.de.gz").unlink()
    with rejected("*/val.de.gz", ..., "cannot be read (No such file or directory)", "get it from"):
        Multi30k(str(tmp_path))


def test_no_folder() -> None:
    with rejected("config.data.dir", ..., "is missing", "give the folder of the original files,"):
        Multi30k(None)


class Records(list):
    def __getitems__(self, numbers: list[int]) -> list[dict]:
        return [self[number] for number in numbers]


def test_wmt16_through_tfds(monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records({"de": f"Satz {n}".encode(), "en": f"Sentence {n}"} for n in range(3000))
    info = types.SimpleNamespace(num_examples=3000, num_bytes=7)
    builder: Any = types.SimpleNamespace(
        data_dir="DIR",
        info=types.SimpleNamespace(splits={"train": info}, file_format=FileFormat.RIEGELI),
        as_data_source=lambda split: records,
    )
    asked = []
    monkeypatch.setattr(
        tfds, "builder", lambda name, data_dir: asked.append((name, data_dir)) or builder
    )
    monkeypatch.setattr(prepare, "is_prepared", lambda actual: actual is builder)
    corpus = Wmt16("DIR")
    assert asked == [("wmt16_translate/de-en", "DIR")] and corpus.splits == ("train",)
    actual = list(corpus.read("train"))
    assert len(actual) == 3000 and actual[2999] == ("Satz 2999", "Sentence 2999")

    def reject(split: str) -> None:
        raise NotImplementedError

    builder.as_data_source = reject
    with rejected("DIR of data set wmt16", ..., "is prepared as riegeli, which cannot be"):
        next(corpus.read("train"))


def test_wmt16_that_is_not_prepared(tmp_path: pathlib.Path) -> None:
    with rejected("data set wmt16", ..., "is not prepared in", "prepare it with"):
        Wmt16(str(tmp_path))
