"""The fast parser agrees with TFDS's on simple splits and leaves all others to TFDS."""

import pytest
from tensorflow_datasets.core import splits as tfds_splits

from lamb_tpu.data import splits

LENGTHS = {"train": 20, "test": 8}


@pytest.mark.parametrize(
    "split", ["train", "test", "train[:5]", "train[3:]", "test[2:8]", "train[0:20]"]
)
def test_simple_splits_are_as_tfds_has_them(split: str) -> None:
    infos = {
        name: tfds_splits.SplitInfo(name=name, shard_lengths=[length], num_bytes=0)
        for name, length in LENGTHS.items()
    }
    (part,) = tfds_splits.AbstractSplit.from_spec(split).to_absolute(infos)
    stop = LENGTHS[part.splitname] if part.to is None else part.to
    assert splits._simple(split, LENGTHS) == (part.splitname, part.from_ or 0, stop)
    assert splits.slices("set", split, LENGTHS) == [splits._simple(split, LENGTHS)]


@pytest.mark.parametrize(
    "split",
    [
        "",
        "dev",
        "train[:]",
        "train[:0]",
        "train[5:3]",
        "train[:21]",
        "train[-3:]",
        "train[:50%]",
        "train+test",
        "train[3]",
        "train[:9999999999999999]",
        "train[:٣]",
        "train[:5] ",
    ],
)
def test_others_are_left_to_tfds(split: str) -> None:
    assert splits._simple(split, LENGTHS) is None


def test_ranges_in_order() -> None:
    assert splits.slices("set", "test[50%:]+train[:-18]", LENGTHS) == [
        ("test", 4, 8),
        ("train", 0, 2),
    ]
