"""SQuAD by its name: fields, what leads back to text, and files that do not fit."""

import json
import pathlib

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.text import saved
from lamb_tpu.data.text.squad_source import SquadSource
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError

WORDS = "who wrote it ? in 1890 , the old man . why".split()
CONTEXT = "In 1890, the old man wrote it."
SIZES = {"max_length": 14, "document_stride": 2, "max_query": 4}


def item(name: str, text: str | None, start: int | None = None) -> dict:
    """A question with an answer, or without one, as v2 has them."""
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
    found = {field: (spec.shape, spec.dtype.name) for field, spec in source.element_spec.items()}
    assert found == {
        "input_ids": ((14,), "int32"),
        "token_type_ids": ((14,), "int32"),
        "attention_mask": ((14,), "bool"),
        "start_position": ((), "int32"),
        "end_position": ((), "int32"),
    }
    assert [question.id for question in source.questions] == ["b", "a", "v2"]
    asked = [source.questions[number].id for number in source.features.question]
    # Nine tokens of context: three windows of seven beside the four tokens of the question.
    assert asked == ["a", "a", "v2"]
    batch = source.gather(np.arange(3))
    assert batch["start_position"].tolist() == [9, 7, 0]
    assert batch["end_position"].tolist() == [11, 9, 0]
    tokens = [source.vocabulary.tokens[token] for token in batch["input_ids"][0]]
    assert tokens[9:12] == ["the", "old", "man"] and source.cased is False
    assert source.notes == (
        "squad:train.json: 1 of 3 questions are left out of training, for their answer does not "
        "stand in the context where the file says; the first is b",
    )


def test_for_evaluation(folder: pathlib.Path) -> None:
    source = load(folder, "train.json", training=False)
    assert "start_position" not in source.element_spec
    assert sorted(set(source.features.question.tolist())) == [0, 1, 2]
    assert [question.impossible for question in source.questions] == [False, False, True]
    assert source.notes == (
        "squad:train.json: 1 of 3 questions have no answer in their context, as SQuAD v2, and "
        "count as wrong unless config.task.version2=True lets them be answered so; the first is v2",
    )


def test_questions_to_predict_only(folder: pathlib.Path) -> None:
    write(folder / "test.json", item("a", "the old man"), {"id": "b", "question": "Who?"})
    assert load(folder, "test.json", training=False).notes == (
        "squad:test.json: 1 of 2 questions have no answer in the file to be scored by, and count "
        "as wrong; the first is b",
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
    "split, options, message",
    [
        (
            "dev.json",
            {},
            r"dev.json is no file; .* config.data.dir, which has bad.json, train.json$",
        ),
        ("bad.json", {}, "none of the 1 questions can be trained on: .* the first is b"),
        (
            "train.json",
            {"cased": True},
            r"options.cased is True, but .*net is of text with cased = F",
        ),
        ("train.json", {"vocab": None}, "config.data.options.vocab is missing; give the path of"),
        ("train.json", {"vocab": "none.txt"}, "the vocabulary none.txt cannot be read"),
        (
            "train.json",
            {"strid": 3},
            "config.data.options.strid is unknown; squad has, .*vocab = ''",
        ),
    ],
)
def test_mistakes(folder: pathlib.Path, split: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(folder, split, **options)


def test_no_folder() -> None:
    with pytest.raises(UserError, match="config.data.dir is missing; for squad it is"):
        data.load("squad", "train-v1.1.json")
