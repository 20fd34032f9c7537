"""The SQuAD data set: fields, mapping back to text, and wrong files."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import saved
from lamb_tpu.data.text.squad_source import SquadSource
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.raising import rejected

WORDS = "who wrote it ? in 1890 , the old man . why".split()
CONTEXT = "In 1890, the old man wrote it."
SIZES = {"max_length": 14, "document_stride": 2, "max_query": 4}


def item(name: str, text: str | None, start: int | None = None) -> dict:
    if text is None:
        return {"id": name, "question": "Why?", "answers": [], "is_impossible": True}
    start = CONTEXT.index(text) if start is None else start
    return {
        "id": name,
        "question": "Who wrote it?",
        "answers": [{"text": text, "answer_start": start}],
    }


def write(path: pathlib.Path, *asked: dict) -> None:
    paragraphs = [{"context": CONTEXT, "qas": list(asked)}]
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "net").mkdir()
    saved.save(tmp_path / "net", Vocabulary([*SPECIAL_TOKENS, *WORDS]), cased=False)
    good, bad = item("a", "the old man"), item("b", "the old man", start=3)
    write(tmp_path / "train.json", bad, good, item("v2", None))
    write(tmp_path / "bad.json", bad)
    return tmp_path


def load(folder: pathlib.Path, split: str, training: bool = True, **options: object) -> SquadSource:
    options = {"vocab": str(folder / "net"), **SIZES, **options}
    return data.load("squad", split, source_dir=str(folder), options=options, training=training)


def test_for_training(folder: pathlib.Path) -> None:
    source = load(folder, "train.json")
    actual = {field: (spec.shape, spec.dtype.name) for field, spec in source.element_spec.items()}
    assert actual == {
        "input_ids": ((14,), "int32"),
        "token_type_ids": ((14,), "int32"),
        "attention_mask": ((14,), "bool"),
        "start_position": ((), "int32"),
        "end_position": ((), "int32"),
    }
    assert [question.id for question in source.questions] == ["b", "a", "v2"]
    asked = [source.questions[number].id for number in source.features.question]
    # The context has nine tokens. The four tokens of question a leave seven for the context, so there
    # are two windows; the two tokens of question v2 leave nine, so there is one window.
    assert asked == ["a", "a", "v2"]
    batch = source.gather(np.arange(3))
    assert batch["start_position"].tolist() == [9, 7, 0]
    assert batch["end_position"].tolist() == [11, 9, 0]
    tokens = [source.vocabulary.tokens[token] for token in batch["input_ids"][0]]
    assert tokens[9:12] == ["the", "old", "man"] and source.cased is False
    assert source.notes == (
        "squad:train.json: 1 of 3 questions are left out of training, because their answer is "
        "not in the context at the position that the file gives; the first is b",
    )


def test_for_evaluation(folder: pathlib.Path) -> None:
    source = load(folder, "train.json", training=False)
    assert "start_position" not in source.element_spec
    assert sorted(set(source.features.question.tolist())) == [0, 1, 2]
    assert [question.impossible for question in source.questions] == [False, False, True]
    assert source.notes == (
        "squad:train.json: 1 of 3 questions have no answer in their context, as in SQuAD v2, "
        "and count as wrong unless config.task.version2=True allows the answer to be empty; the "
        "first is v2",
    )


def test_questions_to_predict_only(folder: pathlib.Path) -> None:
    write(folder / "test.json", item("a", "the old man"), {"id": "b", "question": "Who?"})
    assert load(folder, "test.json", training=False).notes == (
        "squad:test.json: 1 of 2 questions have no answer in the file, and count as wrong; the "
        "first is b",
    )
    write(folder / "test.json", item("a", "the old man"))
    assert load(folder, "test.json", training=False).notes == ()


def test_the_name_is_of_the_content(folder: pathlib.Path) -> None:
    first = load(folder, "train.json").name
    assert first.startswith("squad:train.json:")
    assert load(folder, "train.json", vocab=str(folder / "net" / "vocab.txt")).name == first
    others = [load(folder, "train.json", max_length=16).name]
    Vocabulary([*SPECIAL_TOKENS, *reversed(WORDS)]).write(folder / "net" / "vocab.txt")
    others.append(load(folder, "train.json").name)
    assert len({first, *others}) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cased": True}, ("config.data.options.cased", True, "differs from the vocabulary")),
        ({"vocab": None}, ("config.data.options.vocab", ..., "is missing")),
        ({"vocab": "none.txt"}, ("the vocabulary none.txt", ..., "cannot be read (No such file")),
        ({"strid": 3}, ("config.data.options.strid", ..., "is unknown")),
    ],
)
def test_options(folder: pathlib.Path, options: dict, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        load(folder, "train.json", **options)


def test_files(folder: pathlib.Path) -> None:
    with rejected("*/dev.json", ..., "is not a file", "set the split to the name of a file"):
        load(folder, "dev.json")
    with rejected("every question (1 in all)", ..., "has no answer at the"):
        load(folder, "bad.json")
    with rejected("config.data.dir", ..., "is missing", "give the folder of the JSON files, such"):
        data.load("squad", "train-v1.1.json")
