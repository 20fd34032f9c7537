"""Reading of Multi30k's original files, and of a set in TFDS's form."""

import pathlib
import shutil
import types
from typing import Any

import pytest

from lamb_tpu.data.text import pairs
from lamb_tpu.data.text.pairs import Multi30k, Pair, Wmt16
from lamb_tpu.errors import UserError
from tests.shared import shared


def test_multi30k() -> None:
    corpus = Multi30k(str(shared("data", "multi30k")))
    counts = {split: sum(1 for _ in corpus.read(split)) for split in corpus.splits}
    assert counts == {"train": 29_000, "validation": 1_014, "test": 1_000, "test_2017": 1_000}
    assert next(corpus.read("train")) == Pair(
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
        "Two young, White males are outside near many bushes.",
    )


def test_another_file_is_refused(tmp_path: pathlib.Path) -> None:
    for path in shared("data", "multi30k").glob("*.[de][en].gz"):
        shutil.copy(path, tmp_path / path.name)
    Multi30k(str(tmp_path))
    (tmp_path / "val.de.gz").chmod(0o644)
    (tmp_path / "val.de.gz").write_bytes((tmp_path / "val.en.gz").read_bytes())
    with pytest.raises(UserError, match=r"val.de.gz is not the original file: it has sha256 14f7"):
        Multi30k(str(tmp_path))
    (tmp_path / "val.de.gz").unlink()
    with pytest.raises(UserError, match=r"val.de.gz cannot be read .*; get it from https://"):
        Multi30k(str(tmp_path))


def test_no_folder() -> None:
    with pytest.raises(UserError, match="config.data.dir is missing; for multi30k"):
        Multi30k(None)


class Records(list):
    def __getitems__(self, numbers: list[int]) -> list[dict]:
        return [self[number] for number in numbers]


def test_wmt16_through_tfds(monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records({"de": f"Satz {n}".encode(), "en": f"Sentence {n}"} for n in range(3000))
    info = types.SimpleNamespace(num_examples=3000, num_bytes=7)
    builder: Any = types.SimpleNamespace(
        data_dir="DIR",
        info=types.SimpleNamespace(splits={"train": info}, file_format="riegeli"),
        as_data_source=lambda split: records,
    )
    asked = []
    monkeypatch.setattr(
        pairs.tfds, "builder", lambda name, data_dir: asked.append((name, data_dir)) or builder
    )
    monkeypatch.setattr(pairs, "is_prepared", lambda found: found is builder)
    corpus = Wmt16("DIR")
    assert asked == [("wmt16_translate/de-en", "DIR")] and corpus.splits == ("train",)
    found = list(corpus.read("train"))
    assert len(found) == 3000 and found[2999] == ("Satz 2999", "Sentence 2999")

    def refuse(split: str) -> None:
        raise NotImplementedError

    builder.as_data_source = refuse
    with pytest.raises(UserError, match="is prepared as riegeli, which cannot be read by index"):
        next(corpus.read("train"))


def test_wmt16_that_is_not_prepared(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="wmt16 is not prepared in .*file_format='array_record'"):
        Wmt16(str(tmp_path))
