"""The Penn Treebank: its real files, compressed files, and missing files."""

import lzma
import os
import pathlib

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import ptb
from lamb_tpu.files import reading
from tests.raising import rejected
from tests.shared import shared

LINES = {"train": " a b \n a c \n", "valid": " c a \n", "test": " b \n"}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for split, text in LINES.items():
        (tmp_path / f"ptb.{split}.txt").write_text(text)
    return tmp_path


def load(folder: pathlib.Path | None, split: str, **options: object) -> data.Source:
    named = {"source_dir": folder and str(folder), "training": split == "train"}
    return data.load("ptb", split, options=options, batch_size=2, **named)


def test_words_are_numbered_by_the_training_text(folder: pathlib.Path) -> None:
    train = load(folder, "train", steps=2)
    assert train.streams == 2 and train.num_classes == 4
    # <eos> and a occur twice, b and c once.
    batch = train.gather(np.arange(2))
    assert batch["inputs"].tolist() == [[1, 2], [1, 3]]
    assert batch["targets"].tolist() == [[2, 0], [3, 0]]
    held_out = load(folder, "valid", steps=2)
    assert held_out.gather(np.zeros(1, int))["inputs"].tolist() == [[[3, 1]]]
    assert held_out.num_classes == 4 and held_out.streams is None


def test_packed_files(folder: pathlib.Path) -> None:
    plain = [load(folder, split, steps=1).name for split in LINES]
    for split, text in LINES.items():
        (folder / f"ptb.{split}.txt").unlink()
        (folder / f"ptb.{split}.txt.xz").write_bytes(lzma.compress(text.encode()))
    assert [load(folder, split, steps=1).name for split in LINES] == plain
    (folder / "ptb.test.txt.xz").write_bytes(b"no xz")
    with rejected("*/ptb.test.txt", ..., "cannot be read (Input format not supported by decoder)"):
        load(folder, "test")


def test_damaged_packed_files(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "ptb.test.txt"
    path.unlink()
    packed = path.with_name("ptb.test.txt.xz")
    content = lzma.compress(b"\xef\xbb\xbfa b\n" * 9)
    monkeypatch.setattr(reading, "MAX_TEXT_BYTES", 1000)
    for damaged, reason in (
        (content[:-20], "end-of-stream marker"),
        (lzma.compress(b"a\nb\xff"), "line 2 is not UTF-8 (byte 0xff"),
        (lzma.compress(b"a\0"), "line 1 has a NUL byte"),
        # A decompression bomb is unpacked only up to the limit.
        (lzma.compress(bytes(10**7)), "it unpacks to more than 1,000 bytes"),
    ):
        packed.write_bytes(damaged)
        with rejected("*/ptb.test.txt", ..., reason):
            load(folder, "test")
    packed.unlink()
    os.mkfifo(packed)
    with rejected("*/ptb.test.txt", ..., "cannot be read (it is a pipe, not a file)"):
        load(folder, "test")


def test_errors(folder: pathlib.Path) -> None:
    with rejected("config.data.dir", ..., "is missing", "give the folder of ptb.train.txt,"):
        load(None, "train")
    with rejected("split of config.data.name='ptb'", "dev", "is unknown"):
        load(folder, "dev")
    (folder / "ptb.valid.txt").unlink()
    with rejected("*/ptb.valid.txt", ..., "which has ptb.test.txt, ptb.train.txt"):
        load(folder, "valid")
    with rejected("config.data.options.windows", ..., "is unknown"):
        load(folder, "test", windows=3)


def test_the_real_files() -> None:
    folder = shared("data", "ptb")
    for split, total in ptb.NUM_WORDS.items():
        actual = load(folder, split, steps=20)
        known = data.load_shapes(
            "ptb", split, options={"steps": 20}, training=split == "train", batch_size=2
        )
        assert (len(actual), actual.num_classes) == (len(known), known.num_classes)
        assert actual.num_classes == ptb.VOCABULARY
        assert actual.element_spec == known.element_spec
        if split == "train":
            assert len(actual) == 2 * ((total // 2 - 1) // 20)
        else:
            assert actual.arrays["length"].tolist() == [total - 1]
