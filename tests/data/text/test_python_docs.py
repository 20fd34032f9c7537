"""The text of Python's help: prose, disjoint splits, and fast preparation."""

import time

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import python_docs
from tests.raising import rejected


@pytest.fixture(scope="module")
def splits() -> dict[str, data.Source]:
    start = time.process_time()
    loaded = {
        split: data.load("python_docs", split, options={"sequence_length": 64}, training=training)
        for split, training in (("train", True), ("test", False))
    }
    assert time.process_time() - start < 10  # about two seconds on one core
    return loaded


def test_the_text_is_prose() -> None:
    train, test = (python_docs.documents(split) for split in ("train", "test"))
    assert not set(train) & set(test)
    paragraphs = [
        [text for actual in split_.values() for text in actual] for split_ in (train, test)
    ]
    assert not set(paragraphs[0]) & set(paragraphs[1])
    assert len(paragraphs[0]) > 2 * len(paragraphs[1]) > 100
    text = "\n".join(paragraphs[0] + paragraphs[1])
    assert 150_000 < len(text) < 1_000_000
    assert not any(mark in text for mark in ("::=", ">>>", "*****", "====", "  "))
    assert "Assignment statements are used to (re)bind names to values" in text


def test_masked_words(splits: dict[str, data.Source]) -> None:
    train, test = splits["train"], splits["test"]
    assert len(train.vocabulary) == 2048 and train.vocabulary.tokens == test.vocabulary.tokens
    data.check_same_text(train, test)
    assert train.name != test.name and train.name.startswith("masked_lm:train:")
    assert len(train) > 2 * len(test) > 100
    batch = train.gather(np.arange(len(train)))
    ids = batch["input_ids"][batch["attention_mask"]]
    assert (ids == train.vocabulary.unknown_id).mean() < 0.01
    words = " ".join(train.vocabulary.tokens[token] for token in ids[:3000])
    assert " statement" in words and " the " in words


def test_evaluation_is_the_same_for_every_seed() -> None:
    first, other = (
        data.load("python_docs", "test", seed=seed, training=False).gather(np.arange(50))
        for seed in (0, 5)
    )
    trained = data.load("python_docs", "test", seed=5).gather(np.arange(50))
    for field, values in first.items():
        np.testing.assert_array_equal(values, other[field])
    assert (first["masked_positions"] != trained["masked_positions"]).any()


def test_cloze_questions_have_their_answers() -> None:
    questions = python_docs.cloze_questions("train")
    assert len(questions) > 500 and len({question.id for question in questions}) == len(questions)
    for question in questions:
        ((answer, start),) = question.answers
        assert question.context[start : start + len(answer)] == answer
        gaps = [index for index, letter in enumerate(question.text) if letter == "_"]
        filled = [question.text[:gap] + answer + question.text[gap + 1 :] for gap in gaps]
        assert any(text in question.context for text in filled)


def test_cloze_source() -> None:
    options = {"max_length": 128, "document_stride": 32, "max_query": 48}
    train = data.load("python_docs_cloze", "train", options=options)
    test = data.load("python_docs_cloze", "test", options=options, training=False)
    assert train.notes == () and train.element_spec["input_ids"].shape == (128,)
    assert len(test.questions) > 100 and "start_position" not in test.element_spec
    batch = train.gather(np.arange(len(train)))
    assert (batch["start_position"] > 0).mean() > 0.5
    masked = data.load("python_docs", "train")
    assert train.vocabulary.tokens == masked.vocabulary.tokens


@pytest.mark.parametrize("name", ["python_docs", "python_docs_cloze"])
def test_errors(name: str) -> None:
    with rejected("split of Python's help topics", "dev", "is unknown", "use train or test"):
        data.load(name, "dev")
    with rejected("config.data.options.vocab_size", 100, "is out of range", "use at least 512"):
        data.load(name, "train", options={"vocab_size": 100})
    with rejected("config.data.options.vocab", ..., "is unknown"):
        data.load(name, "train", options={"vocab": "x"})
