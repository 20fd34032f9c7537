"""Pairs as padded batches of like lengths."""

import pathlib

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import grammar
from lamb_tpu.data.text.pair_source import PairSource
from lamb_tpu.errors import UserError


def source(split: str = "train", training: bool = True, **options: int) -> PairSource:
    chosen = {"vocab_size": 250, "max_length": 16, "widths": 4, **options}
    return data.load("grammar_de_en", split, options=chosen, training=training)


def test_fields() -> None:
    found, vocabulary = source(max_length=20), source().vocabulary
    assert len(found) == 1687
    batch = found.gather(np.array([5, 0]))
    assert {name: (spec.shape, spec.dtype) for name, spec in found.element_spec.items()} == {
        name: (values.shape[1:], values.dtype) for name, values in batch.items()
    }
    pairs = list(grammar.read("train"))
    for row, number in enumerate((5, 0)):
        ids, size = batch["source_ids"][row], batch["source_length"][row]
        assert ids[size - 1] == vocabulary.sep_id and not ids[size:].any() and ids[:size].all()
        assert found.text(ids) == pairs[number].source
        ids, size = batch["target_ids"][row], batch["target_length"][row]
        assert ids[0] == vocabulary.cls_id and ids[size - 1] == vocabulary.sep_id
        assert not ids[size:].any() and ids[:size].all()
        assert found.text(ids) == pairs[number].target


def test_long_pairs_are_left_out_of_training_only() -> None:
    found = source()
    assert 0 < len(found) < 1687
    (note,) = found.notes
    assert f"{1687 - len(found):,} of 1,687 pairs have a sentence of more than 16 tokens" in note
    whole = source(training=False)
    assert len(whole) == 1687 and not whole.notes and whole.buckets is None
    assert whole.element_spec["source_ids"].shape == (24,)  # its longest has 20
    assert whole.references == [pair.target for pair in grammar.read("train")]
    part = source("train[10:12]", training=False)
    assert part.references == whole.references[10:12]


def test_every_batch_is_cut_to_its_longest_sentence() -> None:
    found = source()
    loader = data.TrainLoader(found, 32, seed=1)
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
    found, size = source(), 32
    everything = found.gather(np.arange(len(found)))

    def rows(batch: dict) -> list[bytes]:
        return [bytes(ids[:n]) for ids, n in zip(batch["source_ids"], batch["source_length"])]

    loader = data.TrainLoader(found, size, seed=2)
    batches = [rows(next(loader)) for _ in range(2 * len(found) // size + 1)]
    stream = [row for batch in batches for row in batch]
    for epoch in range(2):
        part = stream[epoch * len(found) : (epoch + 1) * len(found)]
        assert sorted(part) == sorted(rows(everything))
    # Two processes, each with its rows; and one that goes on in the middle.
    halves = [data.TrainLoader(found, size, 2, np.arange(k, size, 2)) for k in range(2)]
    for batch in batches[:40]:
        first, second = (rows(next(half)) for half in halves)
        assert first == batch[::2] and second == batch[1::2]
    again = data.TrainLoader(found, size, seed=2)
    again.restore(halves[0].state())
    assert rows(next(again)) == batches[40]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 3}, "config.data.options.max_length is 3, and every pair of .* is longer"),
        ({"widths": 0}, "config.data.options.widths is 0; it must be at least 1"),
        ({"widths": 17}, "config.data.options.widths is 17; it must be .* at most max_length"),
        ({"vocab_size": 9}, "config.data.options.vocab_size=9 is too few"),
    ],
)
def test_options_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        source(**{"widths": 1, **options})


def test_splits(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="data set grammar_de_en: split 'dev' is not one"):
        source("dev")
    with pytest.raises(UserError, match=r"split 'train\+test' is of several; give slices of one"):
        source("train+test")
    with pytest.raises(UserError, match="config.data.dir is missing; for multi30k"):
        data.load("multi30k", "train", data_dir=str(tmp_path))
