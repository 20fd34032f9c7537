"""SQuAD: files, windows as in `run_squad.py`, and the mapping of answers to tokens and back."""

import json
import math
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from lamb_tpu.data.text import squad
from lamb_tpu.data.text.squad import Features, Question, make_features, read_questions
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer
from tests.raising import rejected
from tests.shared import shared

WORDS = "who wrote it ? in 18 ##90 , the old man ( b ##orn 1850 ) caf ##e ##s . cafe".split()
SHORT = {"max_length": 30, "document_stride": 10, "max_query": 4}
CONTEXT = "In 1890, the  old man (born 1850)\nwrote it. Cafés"


@pytest.fixture(scope="module")
def tiny() -> Vocabulary:
    return Vocabulary([*SPECIAL_TOKENS, *WORDS])


@pytest.fixture(scope="module")
def xquad() -> list[Question]:
    return read_questions(shared("data", "squad", "xquad.en.json"))


def ask(text: str, start: int | None = None, **fields: object) -> Question:
    start_ = CONTEXT.find(text) if start is None else start
    return Question("q", "Who wrote it?", CONTEXT, ((text, start_),), **fields)


def tokens(features: Features, row: int, vocabulary: Vocabulary) -> str:
    ids = features.arrays["input_ids"][row]
    return " ".join(vocabulary.tokens[token] for token in ids)


def test_one_window_by_hand(tiny: Vocabulary) -> None:
    features = make_features([ask("the  old man")], tiny, training=True, **SHORT)
    assert tokens(features, 0, tiny) == (
        "[CLS] who wrote it ? [SEP] in 18 ##90 , the old man ( b ##orn 1850 ) wrote it . "
        "cafe ##s [SEP] [PAD] [PAD] [PAD] [PAD] [PAD] [PAD]"
    )
    arrays = features.arrays
    assert arrays["token_type_ids"][0].tolist() == [0] * 6 + [1] * 18 + [0] * 6
    assert arrays["attention_mask"][0].tolist() == [True] * 24 + [False] * 6
    assert (arrays["start_position"][0], arrays["end_position"][0]) == (10, 12)
    words = [CONTEXT[a:b] for a, b in zip(features.char_start[0], features.char_stop[0]) if a >= 0]
    assert words == "In 18 90 , the old man ( b orn 1850 ) wrote it . Café s".split()
    assert (features.char_start[0] >= 0).sum() == features.best_window[0].sum() == 17
    assert features.unmappable == () and features.question.tolist() == [0]


@pytest.mark.parametrize(
    "text, actual",
    [
        ("1890", "18 ##90"),
        ("90", "##90"),
        ("Cafés", "cafe ##s"),
        ("afé", "cafe"),
        ("born 1850", "b ##orn 1850"),
        (")\nwrote", ") wrote"),
        ("In", "in"),
    ],
)
def test_answers_within_words(tiny: Vocabulary, text: str, actual: str) -> None:
    features = make_features([ask(text)], tiny, training=True, **SHORT)
    start, end = (int(features.arrays[f"{side}_position"][0]) for side in ("start", "end"))
    assert " ".join(tokens(features, 0, tiny).split()[start : end + 1]) == actual


@pytest.mark.parametrize(
    "text, start",
    [("the old man", 9), ("1890", 4), ("1890", -1), ("", 3), ("nothing of it", 3), ("  ", 12)],
)
def test_answers_that_do_not_occur_are_counted(tiny: Vocabulary, text: str, start: int) -> None:
    good = ask("1890")
    both = [Question("bad", "who", CONTEXT, ((text, start),)), good]
    features = make_features(both, tiny, training=True, **SHORT)
    assert features.unmappable == ("bad",) and features.question.tolist() == [1]
    # Evaluation keeps every question.
    features = make_features(both, tiny, **SHORT)
    assert features.unmappable == () and features.question.tolist() == [0, 1]
    assert "start_position" not in features.arrays


def plain_windows(
    query: list[int], context: list[int], max_length: int, stride: int
) -> list[tuple[list[int], list[bool]]]:
    """Returns each window's unpadded ids and its `token_is_max_context`, as in `run_squad.py`."""
    max_context = max_length - len(query) - 3
    spans, start = [], 0
    while start < len(context):
        length = min(len(context) - start, max_context)
        spans.append((start, length))
        if start + length == len(context):
            break
        start += min(length, stride)
    windows = []
    for start, length in spans:
        best = []
        for position in range(start, start + length):
            scores = [
                min(position - first, first + size - 1 - position) + 0.01 * size
                for first, size in spans
                if first <= position < first + size
            ]
            score = min(position - start, start + length - 1 - position) + 0.01 * length
            earlier = [
                s for s in spans[: spans.index((start, length))] if s[0] <= position < s[0] + s[1]
            ]
            tied = any(
                min(position - f, f + n - 1 - position) + 0.01 * n == score for f, n in earlier
            )
            best.append(score == max(scores) and not tied)
        inside = context[start : start + length]
        windows.append(([101, *query, 102, *inside, 102], best))
    return windows


@pytest.mark.parametrize("max_length, stride, max_query", [(384, 128, 64), (60, 13, 9)])
def test_windows_are_those_of_the_original(
    vocabulary: Vocabulary, xquad: list[Question], max_length: int, stride: int, max_query: int
) -> None:
    questions = xquad[:150]
    tokenizer = make_tokenizer(vocabulary, cased=False)
    features = make_features(
        questions, vocabulary, max_length=max_length, document_stride=stride, max_query=max_query
    )
    row = 0
    for number, question in enumerate(questions):
        query = tokenizer.encode(question.text).ids[:max_query]
        context = tokenizer.encode(question.context).ids
        for ids, best in plain_windows(query, context, max_length, stride):
            assert features.question[row] == number
            padding = [0] * (max_length - len(ids))
            assert features.arrays["input_ids"][row].tolist() == ids + padding
            offset = len(query) + 2
            of_window = features.best_window[row]
            assert of_window[offset : offset + len(best)].tolist() == best
            assert of_window.sum() == sum(best)
            assert features.arrays["attention_mask"][row].sum() == len(ids)
            assert features.arrays["token_type_ids"][row].sum() == len(best) + 1
            row += 1
    assert row == len(features.question) and row > len(questions) * (max_length < 100)


def test_short_windows_lose_some_tokens_more() -> None:
    for num_tokens in range(700, 960, 3):
        spans = [(0, 378)]
        while sum(spans[-1]) < num_tokens:
            first = spans[-1][0] + 128
            spans.append((first, min(378, num_tokens - first)))
        expected = []
        for position in range(num_tokens):  # `_check_is_max_context`
            best_score, best = -1.0, -1
            for number, (first, size) in enumerate(spans):
                if first <= position < first + size:
                    score = min(position - first, first + size - 1 - position) + 0.01 * size
                    if score > best_score:
                        best_score, best = score, number
            expected.append(best)
        firsts, sizes = np.array(spans).T
        assert squad._best_windows(firsts, sizes, num_tokens).tolist() == expected


def test_the_number_of_windows_of_dev(vocabulary: Vocabulary) -> None:
    questions = read_questions(shared("data", "squad", "dev-v1.1.json"))
    assert len(questions) == 10_570 and sum(len(q.answers) for q in questions) == 34_726
    features = make_features(questions, vocabulary)
    assert len(features.question) == 10_833  # as `run_squad.py` logs for bert_uncased
    assert len(set(features.question.tolist())) == 10_570
    assert (np.diff(features.question) >= 0).all()


def test_training_answers_come_back(vocabulary: Vocabulary) -> None:
    questions = read_questions(shared("data", "squad", "train-v1.1.subset44.json"))[:3000]
    features = make_features(questions, vocabulary, training=True)
    assert features.unmappable == ()
    same, actual = 0, set()
    for row, number in enumerate(features.question):
        start, end = (features.arrays[f"{side}_position"][row] for side in ("start", "end"))
        if start == 0:
            continue
        actual.add(int(number))
        first, last = features.char_start[row, start], features.char_stop[row, end]
        text, start_ = questions[number].answers[0]
        assert first <= start_ and start_ + len(text) <= last
        same += questions[number].context[first:last] == text
    assert len(actual) > 0.995 * len(questions)  # others do not fit into a window
    total = (features.arrays["start_position"] > 0).sum()
    assert same > 0.98 * total  # the other answers begin or end within a token


def test_impossible_questions_point_at_the_start(tiny: Vocabulary) -> None:
    question = Question("q", "who", CONTEXT, (), impossible=True)
    features = make_features([question], tiny, training=True, **SHORT)
    assert features.arrays["start_position"].tolist() == [0]
    assert features.arrays["end_position"].tolist() == [0]


def test_reading_both_versions(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "v2.json"
    asked = [
        {"id": "a", "question": "who?", "answers": [{"text": "b", "answer_start": 2}]},
        {"id": "c", "question": "why?", "answers": [], "is_impossible": True},
    ]
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "a b", "qas": asked}]}]}))
    assert read_questions(path) == [
        Question("a", "who?", "a b", (("b", 2),)),
        Question("c", "why?", "a b", (), True),
    ]


WHOLE = "qas[1].answers[1].answer_start"


@pytest.mark.parametrize(
    "content, message",
    [
        (None, ("*", ..., "cannot be read")),
        ("{", ("*", ..., "is not a SQuAD file (Expecting")),
        ("[" * 100_000, ("*", ..., "is not a SQuAD file (it is nested too deep")),
        ("[]", ("*is not a SQuAD file: content", [], "is not valid", "use a section of keys")),
        ("5", ("*is not a SQuAD file: content", 5, "is not valid", "use a section of keys")),
        ("{}", ("*is not a SQuAD file: data", ..., "is missing")),
        ('{"data": "abc"}', ("*: data", "abc", "is not valid", "use a list")),
        ('{"data": {"a": 1}}', ("*: data", {"a": 1}, "is not valid", "use a list")),
        ('{"data": [{"paragraphs": null}]}', ("*: data[1].paragraphs", None, "", "use a list")),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": [[]]}]}]}',
            ("*.qas[1]", [], "", "use a section of keys"),
        ),
        ('{"data": []}', ("*", ..., "has no question")),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', ("*.id", ..., "is missing")),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "x", "question": "q"},'
            ' {"id": "x", "question": "q"}]}]}]}',
            ("*", ..., "has the question x twice"),
        ),
        (
            '{"data": [{"paragraphs": [{"context": "\\ud800", "qas": [{"id": "x", "question": "q"}]}]}]}',
            ("*", ..., "has an unpaired surrogate"),
        ),
    ],
)
def test_wrong_file(tmp_path: pathlib.Path, content: str | None, message: tuple[Any, ...]) -> None:
    path = tmp_path / "squad.json"
    if content is not None:
        path.write_text(content)
    with rejected(*message) as caught:
        read_questions(path)
    assert str(path) in str(caught.value)


def test_a_pipe_is_no_squad_file(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "squad.json")
    with rejected("*/squad.json", ..., "is not a SQuAD file (it is a pipe, not a file)"):
        read_questions(tmp_path / "squad.json")


def test_a_context_without_end_is_rejected(tiny: Vocabulary) -> None:
    question = Question("q", "who", "a b " * 20_000, ())
    with rejected("the question that begins 'who'", ..., "has a context of 40,000 tokens, too"):
        make_features([question], tiny, max_length=16, max_query=4, document_stride=4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"id": None}, "qas[1].id"),
        ({"id": 7}, "qas[1].id"),
        ({"question": None}, "qas[1].question"),
        ({"question": ["who"]}, "qas[1].question"),
        ({"context": None}, "paragraphs[1].context"),
        ({"answers": None}, "qas[1].answers"),
        ({"answers": {"text": "c"}}, "qas[1].answers"),
        ({"answers": [{"text": None, "answer_start": 0}]}, "answers[1].text"),
        ({"answers": [{"text": "c", "answer_start": "0"}]}, WHOLE),
        ({"answers": [{"text": "c", "answer_start": True}]}, WHOLE),
        ({"answers": [{"text": "c", "answer_start": None}]}, WHOLE),
        ({"answers": [{"text": "c", "answer_start": math.nan}]}, WHOLE),
        ({"answers": [{"text": "c", "answer_start": 1.5}]}, WHOLE),
        ({"answers": ["c"]}, "qas[1].answers[1]"),
        ({"is_impossible": "false"}, "qas[1].is_impossible"),
        ({"is_impossible": None}, "qas[1].is_impossible"),
    ],
)
def test_wrong_types(tmp_path: pathlib.Path, change: dict[str, object], message: str) -> None:
    """Without the check, an answer of null would become the text 'None', which would be scored."""
    item = {"id": "q", "question": "who", "answers": [{"text": "c", "answer_start": 0}]} | change
    context = item.pop("context", "c")
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [item]}]}]}))
    with rejected(f"*.{message}", ..., "is not valid"):
        read_questions(path)


def test_bad_lengths(tiny: Vocabulary) -> None:
    with rejected("document_stride", 128, "does not fit into max_length=60 beside max_query=64"):
        make_features([ask("it")], tiny, max_length=60)
    with rejected("document_stride", 30, "does not fit into max_length=30 beside", "use 1 to 23"):
        make_features([ask("it")], tiny, max_length=30, max_query=4, document_stride=30)
    with rejected("question q", ..., "has no answer to train on"):
        make_features([Question("q", "who", CONTEXT, ())], tiny, training=True)
    with rejected("the file", ..., "has no question to make features of", "give another file"):
        make_features([], tiny)
    bad = [ask("1890", start=7), ask("nothing of it", start=3)]
    with rejected("every question (2 in all)", ..., "has no answer at the position in the file"):
        make_features(bad, tiny, training=True)


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize("mark", ["\u0301", "\u200d", "\u00ad", "\ufe0f", "\x07", "\u200d\u0301"])
def test_answers_that_end_in_deleted_characters_come_back(mark: str, cased: bool) -> None:
    # A vocabulary of full words: with case, a word with an accent is [UNK].
    vocabulary = Vocabulary([*SPECIAL_TOKENS, *"we in the cafe , ( )".split()])
    for context in (f"we in cafe{mark} ,", f"we (cafe{mark}), in", f"the cafe{mark}"):
        answer = f"cafe{mark}"
        question = Question("q", "we", context, ((answer, context.index(answer)),))
        features = make_features([question], vocabulary, cased=cased, training=True, **SHORT)
        start, end = (int(features.arrays[f"{side}_position"][0]) for side in ("start", "end"))
        first, last = features.char_start[0, start], features.char_stop[0, end]
        assert context[first:last] == answer


def test_ranges_include_deleted_characters_at_a_start(tiny: Vocabulary) -> None:
    context = "\u200ethe (\u200eold\u200f) man \u200d \u00ad,\x02 it"
    features = make_features([Question("q", "who", context, ())], tiny, **SHORT)
    inside = features.char_start[0] >= 0
    ranges = zip(features.char_start[0][inside], features.char_stop[0][inside])
    # No range includes a space, or a deleted character between two spaces.
    expected = "\u200ethe (\u200e \u200eold\u200f \u200f) man \u00ad,\x02 it"
    assert " ".join(context[start:stop] for start, stop in ranges) == expected


def test_an_answer_that_begins_with_a_deleted_character(tiny: Vocabulary) -> None:
    context = "the (\u200eold) man"
    question = Question("q", "who", context, (("\u200eold", 5),))
    features = make_features([question], tiny, training=True, **SHORT)
    position = int(features.arrays["start_position"][0])
    assert tiny.tokens[features.arrays["input_ids"][0, position]] == "old"
    assert context[features.char_start[0, position] : features.char_stop[0, position]] == (
        "\u200eold"
    )
