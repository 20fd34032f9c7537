"""Pre-training examples: their content is a function of (seed, epoch, index)."""

import itertools
import pathlib
import random

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text.masked_lm import MaskedLmOptions, MaskedLmSource
from lamb_tpu.data.text.shards import TokenShards
from tests.data.text.corpus import write_folder
from tests.raising import rejected

PAD, CLS, SEP, MASK = 0, 2, 3, 4  # as in `corpus.write_folder`
SMALL = MaskedLmOptions(sequence_length=32, max_predictions=5)


def made_up() -> list[list[list[int]]]:
    rng = random.Random(0)
    return [
        [[rng.randrange(5, 64) for _ in range(rng.randint(1, 12))] for _ in range(length)]
        for length in (30, 1, 2, 80, 5)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("masked_lm") / "text"
    write_folder(folder, made_up(), num_shards=2)
    return folder


@pytest.fixture(scope="module")
def shards(folder: pathlib.Path) -> TokenShards:
    return TokenShards(folder)


def everything(source: MaskedLmSource, epochs: int = 0) -> data.Batch:
    return source.gather(np.arange(len(source)), epochs)


def unmasked(batch: data.Batch, row: int) -> list[int]:
    ids = batch["input_ids"][row].copy()
    count = int(batch["masked_weights"][row].sum())
    ids[batch["masked_positions"][row, :count]] = batch["masked_ids"][row, :count]
    return ids.tolist()


def equal(one: data.Batch, other: data.Batch) -> bool:
    assert one.keys() == other.keys()
    return all(np.array_equal(one[field], other[field]) for field in one)


def is_within(segment: list[int], full: list[int]) -> bool:
    text = ",".join(map(str, full))
    return f",{','.join(map(str, segment))}," in f",{text},"


OPTIONS = {
    "pairs": SMALL,
    "sentences": MaskedLmOptions(sequence_length=32, max_predictions=5, next_sentence=False),
    "static": MaskedLmOptions(sequence_length=32, max_predictions=5, dupe_factor=3),
    "static sentences": MaskedLmOptions(32, 5, dupe_factor=2, next_sentence=False),
    "words": MaskedLmOptions(sequence_length=32, max_predictions=5, whole_words=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fields_are_as_announced(shards: TokenShards, name: str) -> None:
    source = MaskedLmSource(shards, OPTIONS[name])
    batch = everything(source)
    assert batch.keys() == source.element_spec.keys()
    for field, spec in source.element_spec.items():
        assert batch[field].shape == (len(source), *spec.shape)
        assert batch[field].dtype == spec.dtype
    assert ("next_sentence_label" in batch) == ("sentences" not in name)
    assert all(len(values) == 0 for values in source.gather(np.zeros(0, np.int64)).values())


def test_pairs_are_text(shards: TokenShards) -> None:
    flat = [sum(document, []) for document in made_up()]
    batch = everything(MaskedLmSource(shards, SMALL))
    labels = batch["next_sentence_label"]
    assert 0.3 < labels.mean() < 0.8 and len(labels) > 30
    for row, label in enumerate(labels):
        ids, types = unmasked(batch, row), batch["token_type_ids"][row].tolist()
        length = int(batch["attention_mask"][row].sum())
        assert ids[length:] == [PAD] * (32 - length) and not any(types[length:])
        assert batch["attention_mask"][row, :length].all()
        first, second = (index for index, token in enumerate(ids) if token == SEP)
        assert ids[0] == CLS and second == length - 1
        assert types[:length] == [0] * (first + 1) + [1] * (second - first)
        a, b = ids[1:first], ids[first + 1 : second]
        of_a = [number for number, document in enumerate(flat) if is_within(a, document)]
        of_b = [number for number, document in enumerate(flat) if is_within(b, document)]
        assert of_a and of_b
        if label and len(a) > 4 and len(b) > 4:
            assert set(of_a).isdisjoint(of_b)
        elif not label:
            assert set(of_a) & set(of_b)
            if length < 32:  # nothing was cut: B begins where A ends
                assert any(is_within(a + b, document) for document in flat)


def test_full_sentences_are_text(shards: TokenShards) -> None:
    source = MaskedLmSource(shards, OPTIONS["sentences"])
    batch = everything(source)
    assert not batch["token_type_ids"].any()
    stream: list[int] = []
    for row in range(len(source)):
        length = int(batch["attention_mask"][row].sum())
        ids = unmasked(batch, row)
        assert ids[0] == CLS and ids[length - 1] == SEP and not any(ids[length:])
        stream += ids[1:length]
    # All tokens in order; separators after each document and at the ends of examples.
    assert [token for token in stream if token != SEP] == sum(sum(made_up(), []), [])
    separators = [index for index, token in enumerate(stream) if token == SEP]
    assert len(source) <= len(separators) <= len(source) + len(made_up())
    text = ",".join(map(str, stream))
    for one, other in itertools.pairwise(made_up()):
        assert f"{one[-1][-1]},{SEP},{other[0][0]}" in text


def test_masks_are_where_they_say(shards: TokenShards) -> None:
    source = MaskedLmSource(shards, SMALL)
    batch = everything(source)
    for row in range(len(source)):
        length = batch["attention_mask"][row].sum()
        count = int(batch["masked_weights"][row].sum())
        assert count == min(5, max(1, round(length * 0.15)))
        ids = batch["input_ids"][row]
        predicted = batch["masked_positions"][row, :count]
        others = np.setdiff1d(np.arange(32), predicted)
        assert not (ids[others] == MASK).any()
        assert not np.isin(batch["masked_ids"][row, :count], [PAD, CLS, SEP, MASK]).any()


def test_whole_words(shards: TokenShards) -> None:
    source = MaskedLmSource(shards, OPTIONS["words"])
    partly = 0
    for epoch in range(3):
        batch = everything(source, epoch)
        for row in range(len(source)):
            ids = np.array(unmasked(batch, row))
            chosen = np.zeros(32, bool)
            chosen[batch["masked_positions"][row, : int(batch["masked_weights"][row].sum())]] = True
            rest = (ids % 4 == 3) & (ids > 4)  # the `##` tokens of `corpus`
            rest[1:] &= ids[:-1] > 4
            partly += (chosen[1:] != chosen[:-1])[rest[1:]].sum()
    assert partly == 0


@pytest.mark.parametrize("name", OPTIONS)
def test_example_is_a_function_of_its_index(folder: pathlib.Path, name: str) -> None:
    first = MaskedLmSource(TokenShards(folder, in_memory=True), OPTIONS[name])
    other = MaskedLmSource(TokenShards(folder, in_memory=False), OPTIONS[name])
    assert first.name == other.name and len(first) == len(other)
    full = [everything(first, epoch) for epoch in range(3)]
    rng = np.random.default_rng(0)
    indices, epochs = rng.integers(0, len(first), 50), rng.integers(0, 3, 50)
    actual = other.gather(indices, epochs)
    for row, (index, epoch) in enumerate(zip(indices, epochs)):
        for field in actual:
            np.testing.assert_array_equal(actual[field][row], full[epoch][field][index])
    assert equal(first.gather(indices), other.gather(indices, 0))


def test_epochs_differ_in_masks_alone(shards: TokenShards) -> None:
    source = MaskedLmSource(shards, SMALL)
    first, second = everything(source, 0), everything(source, 1)
    different = (first["masked_positions"] != second["masked_positions"]).any(1)
    assert different.mean() > 0.9
    for row in range(len(source)):
        assert unmasked(first, row) == unmasked(second, row)


def test_static_masks_stay(shards: TokenShards) -> None:
    for name in ("static", "static sentences"):
        source = MaskedLmSource(shards, OPTIONS[name])
        assert equal(everything(source, 0), everything(source, 7))
    # Copies of full sentences have the same text but other masks; pairs are packed differently.
    size = len(source) // 2
    batch = everything(source)
    assert all(unmasked(batch, row) == unmasked(batch, row + size) for row in range(size))
    positions = batch["masked_positions"]
    assert (positions[:size] != positions[size:]).any(1).mean() > 0.9
    pairs = MaskedLmSource(shards, OPTIONS["static"])
    assert 2.5 * len(MaskedLmSource(shards, SMALL)) < len(pairs)


def test_seeds_differ(shards: TokenShards) -> None:
    one, other = (
        everything(MaskedLmSource(shards, MaskedLmOptions(32, 5, next_sentence=False, seed=seed)))
        for seed in (0, 1)
    )
    assert (one["masked_positions"] != other["masked_positions"]).any(1).mean() > 0.9


def test_batches_of_the_house(shards: TokenShards) -> None:
    source = MaskedLmSource(shards, SMALL)
    full = everything(source)
    batches = list(data.eval_batches(source, 16))
    ids = np.concatenate([batch["input_ids"] for batch in batches])[: len(source)]
    np.testing.assert_array_equal(ids, full["input_ids"])
    loader = data.TrainLoader(source, len(source), seed=0)
    for epoch in (0, 1):  # one batch per epoch
        batch, indices = next(loader), data.example_order(0, epoch, len(source))
        for field, values in everything(source, epoch).items():
            np.testing.assert_array_equal(batch[field], values[indices])
    assert source.vocabulary is shards.vocabulary and source.cased is False
    assert source.name == f"masked_lm:text:{shards.fingerprint}"


@pytest.mark.parametrize(
    "option, value, remedy, others",
    [
        ("sequence_length", 4, "use at least 5", {}),
        ("sequence_length", 2, "use at least 3", {"next_sentence": False}),
        ("max_predictions", 0, "use at least 1", {}),
        ("dupe_factor", -1, "use at least 0", {}),
        ("mask_probability", 1.5, "use 0 to 1", {}),
    ],
)
def test_bad_options(
    shards: TokenShards, option: str, value: float, remedy: str, others: dict
) -> None:
    with rejected(f"config.data.options.{option}", value, "is out of range", remedy):
        MaskedLmSource(shards, MaskedLmOptions(**{option: value}, **others))


def test_bad_seed(shards: TokenShards) -> None:
    with rejected("config.seed", -1, "is out of range", "use 0 to 2**64-1"):
        MaskedLmSource(shards, MaskedLmOptions(seed=-1))


def test_one_document_has_no_other(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path, made_up()[:1])
    shards = TokenShards(tmp_path)
    with rejected("config.data.options.next_sentence", True, "needs at least 2 documents, but"):
        MaskedLmSource(shards, SMALL)
    assert len(MaskedLmSource(shards, OPTIONS["sentences"])) > 1
