"""Sets by name, in particular those that TFDS prepared."""

import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lamb_tpu import data
from lamb_tpu.data import registry
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError
from tests.data.text.corpus import write_folder


class TinyTokens(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Twenty examples of four tokens, in order, with a text beside them."""

    VERSION = tfds.core.Version("1.0.0")
    name = "tiny_tokens"
    url_infos = {}

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "tokens": tfds.features.Tensor(shape=(4,), dtype=np.int32),
            "label": tfds.features.ClassLabel(num_classes=3),
            "text": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict]]:
        for index in range(20):
            tokens = np.arange(4, dtype=np.int32) + index
            yield index, {"tokens": tokens, "label": index % 3, "text": f"number {index}"}


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny"))
    TinyTokens(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


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


def test_size_decides_what_lies_in_memory(tiny_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_memory(limit: int, **arguments: bool) -> bool:
        monkeypatch.setattr(registry, "IN_MEMORY_BYTES", limit)
        return data.load("tfds:tiny_tokens", "train", data_dir=tiny_dir, **arguments).in_memory

    size = 20 * (4 * 4 + 4)
    assert in_memory(size) and not in_memory(size - 1)
    assert in_memory(0, in_memory=True) and not in_memory(size, in_memory=False)


@pytest.mark.long
def test_slice_of_a_set_on_disk(prepared_dir: str) -> None:
    whole = data.load("mnist", "test", data_dir=prepared_dir).arrays["label"]
    for split in ("test[1000:1100]", "test[10%:11%]"):
        part = data.load("mnist", split, data_dir=prepared_dir)
        np.testing.assert_array_equal(part.arrays["label"], whole[1000:1100])


@pytest.mark.parametrize(
    "name, split, message",
    [
        ("minst", "train", "'minst', an unknown data set; known are cifar10, cifar10_jpeg, digits"),
        ("mnist", "validation", r"split 'validation'.* it has .*train \(60,000\)"),
        ("tfds:tiny_tokens", "test", r"split 'test'.* it has train \(20\)"),
        ("tfds:no_such_set", "train", "TFDS has no 'no_such_set'"),
        ("tfds:mnist", "train[:60001]", "split"),
        ("tfds:imagenet2012", "train", "imagenet2012 is not prepared in .*array_record"),
    ],
)
def test_what_is_not_there_is_named(
    tiny_dir: str, prepared_dir: str, name: str, split: str, message: str
) -> None:
    folder = tiny_dir if "tiny" in name else prepared_dir
    with pytest.raises(UserError, match=message):
        data.load(name, split, data_dir=folder)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two prepared folders, and one without a shard that its manifest lists."""
    folder = tmp_path_factory.mktemp("text")
    documents = [[[5 + n, 6, 7] for n in range(20)], [[30, 31]] * 9]
    for split in ("books", "news", "damaged"):
        write_folder(folder / split, documents, num_shards=2)
    next((folder / "damaged").glob("*.array_record")).unlink()
    (folder / "begun").mkdir()
    return folder


def load_text(text_dir: pathlib.Path, split: str, **options: object) -> data.Source:
    return data.load("masked_lm", split, source_dir=str(text_dir), options=options, seed=3)


def test_prepared_text(text_dir: pathlib.Path) -> None:
    source = load_text(text_dir, "books", sequence_length=16, max_predictions=2)
    assert source.name.startswith("masked_lm:books:") and len(source.vocabulary) == 64
    spec = {field: source.element_spec[field].shape for field in ("input_ids", "masked_ids")}
    assert spec == {"input_ids": (16,), "masked_ids": (2,)}
    first = source.gather(np.arange(5))["masked_positions"]
    options = {"sequence_length": 16, "max_predictions": 2}
    other = data.load("masked_lm", "books", source_dir=str(text_dir), options=options, seed=4)
    assert (first != other.gather(np.arange(5))["masked_positions"]).any()


@pytest.mark.parametrize(
    "split, options, message",
    [
        (
            "dev",
            {},
            r"dev is no folder; .* one in config.data.dir, which has books, damaged, news$",
        ),
        ("begun", {}, "begun is no prepared text, .* start it again if it was interrupted"),
        ("damaged", {}, "array_record is missing, though manifest.json lists it"),
        (
            "books",
            {"seed": 1},
            "config.data.options.seed is unknown; masked_lm has, .*max_predictions",
        ),
        (
            "books",
            {"whole_words": 1},
            "config.data.options.whole_words is 1; it must be True or False",
        ),
        ("books", {"sequence_length": 4}, "sequence_length must be at least 5, found 4"),
    ],
)
def test_mistakes_about_text(
    text_dir: pathlib.Path, split: str, options: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_text(text_dir, split, **options)


def test_which_folder_is_meant(text_dir: pathlib.Path) -> None:
    with pytest.raises(UserError, match="which has none; it is a prepared one itself, give the"):
        load_text(text_dir / "books", "books")
    with pytest.raises(UserError, match="config.data.dir is missing; for masked_lm it is the fold"):
        data.load("masked_lm", "books")


def test_both_sets_have_one_vocabulary(text_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ours, same = load_text(text_dir, "books"), load_text(text_dir, "news")
    data.check_same_text(ours, same)
    data.check_same_text(ours, data.load("digits", "train"))
    data.check_same_text(data.load("digits", "train"), ours)
    same.cased = True
    with pytest.raises(UserError, match="set masked_lm:books has cased = False, .*:news has True"):
        data.check_same_text(ours, same)
    write_folder(tmp_path / "small", [[[5]], [[6]]], vocabulary_size=32)
    small = load_text(tmp_path, "small")
    with pytest.raises(UserError, match="books has .*ulary = 64, .* set masked_lm:small has 32;"):
        data.check_same_text(ours, small)
    small.vocabulary = Vocabulary([*SPECIAL_TOKENS, *(f"x{n}" for n in range(59))])
    with pytest.raises(UserError, match="token 5 of .*:books is 'w5', of .*:small 'x0'; prepare"):
        data.check_same_text(ours, small)


@pytest.mark.parametrize("name", ["digits", "mnist", "tfds:tiny_tokens"])
def test_sets_without_options(tiny_dir: str, name: str) -> None:
    with pytest.raises(UserError, match=f"config.data.options.size is unknown; {name} has none"):
        data.load(name, "train", data_dir=tiny_dir, options={"size": 3})


def test_tfds_sets_take_no_originals(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=f"found {tmp_path}; prepare it with TFDS"):
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
        with pytest.raises(UserError, match="prepared as .*cannot be read by index.*array_record"):
            data.load(name, "train", data_dir=str(tmp_path))
