"""Sentence pairs as a data set: fields, batches of similar length, and errors."""

import pathlib
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import grammar
from lamb_tpu.data.text.pair_source import PairSource
from tests.raising import rejected


def source(split: str = "train", training: bool = True, **options: int) -> PairSource:
    chosen = {"vocab_size": 250, "max_length": 16, "widths": 4, **options}
    return data.load("grammar_de_en", split, options=chosen, training=training)


def test_fields() -> None:
    actual, vocabulary = source(max_length=20), source().vocabulary
    assert len(actual) == 1687
    batch = actual.gather(np.array([5, 0]))
    assert {name: (spec.shape, spec.dtype) for name, spec in actual.element_spec.items()} == {
        name: (values.shape[1:], values.dtype) for name, values in batch.items()
    }
    pairs = list(grammar.read("train"))
    for row, number in enumerate((5, 0)):
        ids, size = batch["source_ids"][row], batch["source_length"][row]
        assert ids[size - 1] == vocabulary.sep_id and not ids[size:].any() and ids[:size].all()
        assert actual.text(ids) == pairs[number].source
        ids, size = batch["target_ids"][row], batch["target_length"][row]
        assert ids[0] == vocabulary.cls_id and ids[size - 1] == vocabulary.sep_id
        assert not ids[size:].any() and ids[:size].all()
        assert actual.text(ids) == pairs[number].target


def test_long_pairs_are_left_out_of_training_only() -> None:
    actual = source()
    assert 0 < len(actual) < 1687
    (note,) = actual.notes
    assert f"{1687 - len(actual):,} of 1,687 pairs have a sentence of more than 16 tokens" in note
    full = source(training=False)
    assert len(full) == 1687 and not full.notes and full.buckets is None
    assert full.element_spec["source_ids"].shape == (24,)  # the longest has 20
    assert full.references == [pair.target for pair in grammar.read("train")]
    subset = source("train[10:12]", training=False)
    assert subset.references == full.references[10:12]


def test_every_batch_is_cut_to_its_longest_sentence() -> None:
    actual = source()
    loader = data.TrainLoader(actual, 32, seed=1)
    seen = set()
    for _ in range(60):
        batch = next(loader)
        width = batch["source_ids"].shape[1]
        assert batch["target_ids"].shape[1] == width + 1 and width in (4, 8, 12, 16)
        longest = max(batch["source_length"].max(), batch["target_length"].max() - 1)
        assert width - 4 < longest <= width
        seen.add(width)
    assert seen >= {12, 16}


def test_each_example_once_an_epoch_on_any_processes() -> None:
    actual, size = source(), 32
    everything = actual.gather(np.arange(len(actual)))

    def rows(batch: dict) -> list[bytes]:
        return [bytes(ids[:n]) for ids, n in zip(batch["source_ids"], batch["source_length"])]

    loader = data.TrainLoader(actual, size, seed=2)
    batches = [rows(next(loader)) for _ in range(2 * len(actual) // size + 1)]
    stream = [row for batch in batches for row in batch]
    for epoch in range(2):
        subset = stream[epoch * len(actual) : (epoch + 1) * len(actual)]
        assert sorted(subset) == sorted(rows(everything))
    # Two processes, each with half of the rows; and a process that continues after 40 batches.
    halves = [data.TrainLoader(actual, size, 2, np.arange(k, size, 2)) for k in range(2)]
    for batch in batches[:40]:
        first, second = (rows(next(half)) for half in halves)
        assert first == batch[::2] and second == batch[1::2]
    again = data.TrainLoader(actual, size, seed=2)
    again.restore(halves[0].state())
    assert rows(next(again)) == batches[40]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 3}, ("config.data.options.max_length", 3, "is less than the length of")),
        ({"widths": 0}, ("config.data.options.widths", 0, "is out of range", "use at least 1")),
        ({"widths": 17}, ("config.data.options.widths", 17, "is out of range")),
        ({"vocab_size": 9}, ("config.data.options.vocab_size", 9, "is less than the 81 special")),
    ],
)
def test_options_out_of_range(options: dict, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        source(**{"widths": 1, **options})


def test_splits(tmp_path: pathlib.Path) -> None:
    with rejected("split 'dev' of data set grammar_de_en", ..., "is not valid (Unknown split"):
        source("dev")
    with rejected("split 'train+test' of data set grammar_de_en", ..., "joins several splits"):
        source("train+test")
    with rejected("config.data.dir", ..., "is missing", "give the folder of the original files,"):
        data.load("multi30k", "train", data_dir=str(tmp_path))
