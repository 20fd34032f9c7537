"""The Penn Treebank: its real files, those packed, and those that are missing."""

import lzma
import pathlib

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import ptb
from lamb_tpu.errors import UserError
from tests.shared import shared

LINES = {"train": " a b \n a c \n", "valid": " c a \n", "test": " b \n"}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for split, text in LINES.items():
        (tmp_path / f"ptb.{split}.txt").write_text(text)
    return tmp_path


def load(folder: pathlib.Path | None, split: str, **options: object) -> data.Source:
    return data.load(
        "ptb",
        split,
        source_dir=None if folder is None else str(folder),
        options=options,
        training=split == "train",
        batch_size=2,
    )


def test_words_are_numbered_by_the_training_text(folder: pathlib.Path) -> None:
    train = load(folder, "train", steps=2)
    assert train.streams == 2 and train.num_classes == 4
    # <eos> and a stand twice, b and c once.
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
    with pytest.raises(UserError, match=r"ptb\.test\.txt cannot be read \(Input format"):
        load(folder, "test")


def test_mistakes(folder: pathlib.Path) -> None:
    with pytest.raises(UserError, match="config.data.dir is missing; for ptb it is the folder of"):
        load(None, "train")
    with pytest.raises(UserError, match="ptb has no split 'dev'; it has train, valid, test"):
        load(folder, "dev")
    (folder / "ptb.valid.txt").unlink()
    with pytest.raises(UserError, match=r"ptb\.valid\.txt is missing.*has ptb.test.txt, ptb.tra"):
        load(folder, "valid")
    with pytest.raises(UserError, match="config.data.options.windows is unknown; ptb has"):
        load(folder, "test", windows=3)


def test_the_real_files() -> None:
    folder = shared("data", "ptb")
    for split, total in ptb.NUM_WORDS.items():
        found = load(folder, split, steps=20)
        known = data.load_shapes(
            "ptb", split, options={"steps": 20}, training=split == "train", batch_size=2
        )
        assert (len(found), found.num_classes) == (len(known), known.num_classes)
        assert found.num_classes == ptb.VOCABULARY
        assert found.element_spec == known.element_spec
        if split == "train":
            assert len(found) == 2 * ((total // 2 - 1) // 20)
        else:
            assert found.arrays["length"].tolist() == [total - 1]
