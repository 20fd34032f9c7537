"""Data sets by name, in particular sets prepared by TFDS."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lamb_tpu import data
from lamb_tpu.data import prepared
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.data.text.corpus import write_folder
from tests.data.tiny_tfds import Tiny
from tests.raising import rejected


class TinyTokens(Tiny, skip_registration=True):
    """Twenty examples, in order, each with four tokens and a text field."""

    name = "tiny_tokens"
    features = {
        "tokens": tfds.features.Tensor(shape=(4,), dtype=np.int32),
        "label": tfds.features.ClassLabel(num_classes=3),
        "text": tfds.features.Text(),
    }
    examples = [
        {"tokens": np.arange(4, dtype=np.int32) + n, "label": n % 3, "text": f"number {n}"}
        for n in range(20)
    ]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return TinyTokens.prepare(tmp_path_factory.mktemp("tiny"))


def test_set_prepared_by_tfds(tiny_dir: str) -> None:
    source = data.load("tfds:tiny_tokens", "train[5:]", data_dir=tiny_dir)
    assert source.name == "tfds:tiny_tokens:train[5:]" and source.num_classes == 3
    batch = source.gather(np.array([0, 14]))
    assert batch["tokens"].tolist() == [[5, 6, 7, 8], [19, 20, 21, 22]]
    assert batch["label"].tolist() == [2, 1] and batch["label"].dtype == np.int32
    assert set(batch) == {"tokens", "label"}


def test_home_folder_is_understood(tiny_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", tiny_dir)
    assert len(data.load("tfds:tiny_tokens", "train", data_dir="~")) == 20


def test_size_decides_what_is_in_memory(tiny_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_memory(limit: int, **arguments: bool) -> bool:
        monkeypatch.setattr(prepared, "IN_MEMORY_BYTES", limit)
        return data.load("tfds:tiny_tokens", "train", data_dir=tiny_dir, **arguments).in_memory

    size = 20 * (4 * 4 + 4)
    assert in_memory(size) and not in_memory(size - 1)
    assert in_memory(0, in_memory=True) and not in_memory(size, in_memory=False)


@pytest.mark.long
def test_slice_of_a_set_on_disk(prepared_dir: str) -> None:
    full = data.load("mnist", "test", data_dir=prepared_dir).arrays["label"]
    for split in ("test[1000:1100]", "test[10%:11%]"):
        subset = data.load("mnist", split, data_dir=prepared_dir)
        np.testing.assert_array_equal(subset.arrays["label"], full[1000:1100])


@pytest.mark.parametrize(
    "name, split, message",
    [
        ("minst", "train", ("config.data.name", "minst", "is unknown", "use digits, mnist, fashi")),
        ("mnist", "validation", ("*of data set mnist", ..., "is not valid (Unknown split")),
        ("tfds:tiny_tokens", "test", ("*set tfds:tiny_tokens", ..., "is not valid (Unknown split")),
        ("tfds:no_such_set", "train", ("data set tfds:no_such_set", ..., "is unknown to TFDS (Da")),
        ("tfds:mnist", "train[:60001]", ("*of data set tfds:mnist", ..., "valid (Requested slice")),
        ("tfds:imagenet2012", "train", ("data set tfds:imagenet2012", ..., "is not prepared in")),
    ],
)
def test_missing_files_are_named(
    tiny_dir: str, prepared_dir: str, name: str, split: str, message: tuple[Any, ...]
) -> None:
    folder = tiny_dir if "tiny" in name else prepared_dir
    with rejected(*message):
        data.load(name, split, data_dir=folder)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two prepared folders, a damaged folder that lacks a shard, and an empty folder."""
    folder = tmp_path_factory.mktemp("text")
    documents = [[[5 + n, 6, 7] for n in range(20)], [[30, 31]] * 9]
    for split in ("books", "news", "damaged"):
        write_folder(folder / split, documents, num_shards=2)
    next((folder / "damaged").glob("*.array_record")).unlink()
    (folder / "begun").mkdir()
    return folder


def load_text(text_dir: pathlib.Path, split: str, seed: int = 3, **options: object) -> data.Source:
    return data.load("masked_lm", split, source_dir=str(text_dir), options=options, seed=seed)


def test_prepared_text(text_dir: pathlib.Path) -> None:
    source, other = (
        load_text(text_dir, "books", seed, sequence_length=16, max_predictions=2) for seed in (3, 4)
    )
    assert source.name.startswith("masked_lm:books:") and len(source.vocabulary) == 64
    spec = {field: source.element_spec[field].shape for field in ("input_ids", "masked_ids")}
    assert spec == {"input_ids": (16,), "masked_ids": (2,)}
    first, second = (each.gather(np.arange(5))["masked_positions"] for each in (source, other))
    assert (first != second).any()


@pytest.mark.parametrize(
    "split, message",
    [
        ("dev", ("*/dev", ..., "is not a prepared folder", "a split of config.data.dir: books,")),
        ("begun", ("*/manifest.json", ..., "cannot be read (No such file or directory)")),
        ("damaged", ("*/text-00001-of-00002.array_record", ..., "is missing, though")),
    ],
)
def test_folders_of_text(text_dir: pathlib.Path, split: str, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        load_text(text_dir, split)


@pytest.mark.parametrize(
    "option, value, problem",
    [("sed", ..., "is unknown"), ("whole_words", 1, "wrong type"), ("sequence_length", 4, "range")],
)
def test_options_of_text(text_dir: pathlib.Path, option: str, value: Any, problem: str) -> None:
    with rejected(f"config.data.options.{option}", value, problem):
        load_text(text_dir, "books", **{option: value})
    with rejected("config.data.options.seed", ..., "is unknown", "data set 'masked_lm' has:"):
        data.load("masked_lm", "books", source_dir=str(text_dir), options={"seed": 1})


def test_which_folder_is_meant(text_dir: pathlib.Path) -> None:
    with rejected("*/books", ..., "is not a prepared folder", "use the parent folder as"):
        load_text(text_dir / "books", "books")
    with rejected(
        "config.data.dir", ..., "is missing", "give DIR, the folder that contains 'books'"
    ):
        data.load("masked_lm", "books")


def test_both_sets_have_one_vocabulary(text_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ours, same = load_text(text_dir, "books"), load_text(text_dir, "news")
    data.check_same_text(ours, same)
    data.check_same_text(ours, data.load("digits", "train"))
    data.check_same_text(data.load("digits", "train"), ours)
    same.cased = True
    with rejected(
        "cased of the training set masked_lm:books", False, "from True in the evaluation"
    ):
        data.check_same_text(ours, same)
    write_folder(tmp_path / "small", [[[5]], [[6]]], vocabulary_size=32)
    small = load_text(tmp_path, "small")
    with rejected("*of the training set masked_lm:books", 64, "from 32 in the evaluation set"):
        data.check_same_text(ours, small)
    small.vocabulary = Vocabulary([*SPECIAL_TOKENS, *(f"x{n}" for n in range(59))])
    with rejected("token 5 of the training set masked_lm:books", "w5", "from 'x0' in the eval"):
        data.check_same_text(ours, small)


@pytest.mark.parametrize("name", ["digits", "mnist", "tfds:tiny_tokens"])
def test_sets_without_options(tiny_dir: str, name: str) -> None:
    with rejected("config.data.options.size", ..., "is unknown"):
        data.load(name, "train", data_dir=tiny_dir, options={"size": 3})


def test_tfds_sets_take_no_originals(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    with rejected("config.data.dir", ..., "holds original files, from which data"):
        data.load("tfds:tiny_tokens", "train", data_dir=tiny_dir, source_dir=str(tmp_path))


def test_format_without_random_access(prepared_dir: str, tmp_path: pathlib.Path) -> None:
    written, copy = (pathlib.Path(root, "mnist", "3.0.1") for root in (prepared_dir, tmp_path))
    copy.mkdir(parents=True)
    info = (written / "dataset_info.json").read_text()
    (copy / "dataset_info.json").write_text(info.replace("array_record", "tfrecord"))
    (copy / "features.json").write_bytes((written / "features.json").read_bytes())
    for file in written.glob("*array_record*"):
        (copy / file.name.replace("array_record", "tfrecord")).write_bytes(b"")
    for name in ("mnist", "tfds:mnist"):
        with rejected(f"*3.0.1 of data set {name}", ..., "which cannot be read by index"):
            data.load(name, "train", data_dir=str(tmp_path))
