"""Exact match and F1: the official scores of two systems, and cases computed by hand."""

import json

import pytest

from lamb_tpu.data.text.squad import Question, read_questions
from lamb_tpu.tasks.squad_metric import evaluate, normalize
from tests.shared import shared


@pytest.mark.parametrize(
    "name, exact_match, f1, unanswered",
    [
        ("BERT", 86.20624408703878, 92.19557978351145, 0),
        ("Logistic_Regression_Baseline", 40.14191106906339, 50.98153647324461, 13),
    ],
)
def test_official_figures(name: str, exact_match: float, f1: float, unanswered: int) -> None:
    questions = read_questions(shared("data", "squad", "dev-v1.1.json"))
    predictions = json.loads(shared("data", "squad", "predictions", f"{name}.json").read_text())
    scores = evaluate(questions, predictions)
    assert scores["exact_match"] == pytest.approx(exact_match, abs=1e-10)
    assert scores["f1"] == pytest.approx(f1, abs=1e-10)
    assert scores["unanswered"] == unanswered


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Cat's (hat),\n an owl", "cats hat owl"),
        ("at 5 a.m.", "at 5 am"),
        ("Theatre a-n b", "theatre b"),  # "a-n" becomes "an", which is removed
        ("“quoted” – the dash", "“quoted” – dash"),
        ("x–the–y", "x– –y"),
        ("A", ""),
    ],
)
def test_normalize(text: str, expected: str) -> None:
    assert normalize(text) == expected


def ask(name: str, *answers: str, impossible: bool = False) -> Question:
    return Question(name, "?", "", tuple((answer, 0) for answer in answers), impossible)


@pytest.mark.parametrize(
    "version2, prediction, answers, exact, f1",
    [
        (False, "the old man", ["Old man!"], 100, 100),
        (False, "old", ["new", "old man"], 0, 100 * 2 / 3),
        (False, "a b b", ["b b c c"], 0, 100 * 2 * (2 / 2) * (2 / 4) / (2 / 2 + 2 / 4)),
        (False, "b b x", ["b c"], 0, 100 * 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        (False, "the", ["a"], 100, 0),  # both become empty: equal, but without a common token
        (False, "", ["old"], 0, 0),
        # Version 2 drops answers that are empty after normalisation.
        (True, "the old man", ["Old man!"], 100, 100),
        (True, "", ["the"], 100, 100),  # the only answer becomes empty: impossible
        (True, "a", ["the", "?!"], 100, 100),
        (True, "old", ["the"], 0, 0),
        (True, "", ["the", "old"], 0, 0),  # the other answer remains
        (True, "old", ["the", "old"], 100, 100),
        (True, "", [], 100, 100),
    ],
)
def test_by_hand(
    version2: bool, prediction: str, answers: list[str], exact: float, f1: float
) -> None:
    scores = evaluate([ask("q", *answers)], {"q": prediction, "other": "x"}, version2)
    assert scores["exact_match"] == exact and scores["f1"] == pytest.approx(f1)


def test_version_2_of_an_impossible_question() -> None:
    questions = [ask("a", impossible=True), ask("b", impossible=True)]
    scores = evaluate(questions, {"a": "", "b": "old"}, version2=True)
    assert scores == {"exact_match": 50.0, "f1": 50.0, "unanswered": 0}


def test_means_are_over_all_questions() -> None:
    questions = [ask("a", "x"), ask("b", "y"), ask("c", impossible=True), ask("d", impossible=True)]
    scores = evaluate(questions, {"a": "x", "c": "", "d": "something"})
    assert scores == {"exact_match": 50.0, "f1": 50.0, "unanswered": 1}
