"""Best answers: compared with the plain loops of `run_squad.py`, and with the known answers."""

import numpy as np
import pytest

from lamb_tpu.data.text.squad import Features, Question, make_features, read_questions
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.tasks.squad_answers import Answer, best_answers, choose
from lamb_tpu.tasks.squad_metric import evaluate
from tests.shared import shared


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.read(shared("data", "bert_vocab", "vocab.txt"))


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return read_questions(shared("data", "squad", "xquad.en.json"))[:60]


@pytest.fixture(scope="module")
def features(questions: list[Question], vocabulary: Vocabulary) -> Features:
    return make_features(questions, vocabulary, max_length=96, document_stride=24, max_query=24)


def plain_best(
    questions: list[Question],
    features: Features,
    starts: np.ndarray,
    ends: np.ndarray,
    num_best: int,
    longest: int,
    with_null: bool,
) -> dict[str, list[tuple[str, float]]]:
    """`write_predictions` of `run_squad.py`, as plain loops."""
    answers = {}
    for number, question in enumerate(questions):
        prelim, null = [], float("inf")
        for row in np.flatnonzero(features.question == number):

            def best(logits: np.ndarray) -> list[int]:
                return sorted(range(len(logits)), key=lambda i: -logits[i])[:num_best]

            null = min(null, float(starts[row, 0]) + float(ends[row, 0]))
            for i in best(starts[row]):
                for j in best(ends[row]):
                    if features.char_start[row, i] < 0 or features.char_start[row, j] < 0:
                        continue
                    if not features.best_window[row, i] or j < i or j - i + 1 > longest:
                        continue
                    text = question.context[
                        features.char_start[row, i] : features.char_stop[row, j]
                    ]
                    prelim.append((float(starts[row, i]) + float(ends[row, j]), text))
        if with_null:
            prelim.append((null, ""))
        ranked: list[tuple[str, float]] = []
        for score, text in sorted(prelim, key=lambda item: item[0], reverse=True):
            text = " ".join(text.split())
            if len(ranked) < num_best and text not in [other for other, _ in ranked]:
                ranked.append((text, score))
        if with_null and "" not in [text for text, _ in ranked]:
            ranked.append(("", null))
        answers[question.id] = ranked
    return answers


@pytest.mark.parametrize(
    "num_best, longest, with_null", [(20, 30, False), (3, 5, False), (20, 30, True), (1, 1, True)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_loops_of_the_original(
    questions: list[Question],
    features: Features,
    num_best: int,
    longest: int,
    with_null: bool,
    dtype: type,
) -> None:
    rng = np.random.default_rng(1)
    shape = features.char_start.shape
    starts, ends = (rng.normal(0, 3, shape).round(1).astype(dtype) for _ in range(2))  # with ties
    actual = best_answers(
        questions,
        features,
        starts,
        ends,
        num_best=num_best,
        max_answer_length=longest,
        with_null=with_null,
    )
    expected = plain_best(questions, features, starts, ends, num_best, longest, with_null)
    assert {key: [tuple(item) for item in value] for key, value in actual.items()} == expected


def test_certain_logits_give_the_answers(vocabulary: Vocabulary) -> None:
    questions = read_questions(shared("data", "squad", "train-v1.1.subset44.json"))[:800]
    features = make_features(questions, vocabulary, training=True)
    logits = []
    for side in ("start", "end"):
        positions = features.arrays[f"{side}_position"]
        logits.append(10.0 * (np.arange(384) == positions[:, None]) * (positions > 0)[:, None])
    answers = best_answers(questions, features, *logits)
    scores = evaluate(questions, choose(answers))
    # The missing answers have over 30 tokens, or begin or end within a token.
    assert scores["exact_match"] > 97 and scores["f1"] > 98 and scores["unanswered"] == 0


def test_by_hand() -> None:
    answers = {
        "a": [Answer("yes", 5.0), Answer("", 4.0), Answer("no", 1.0)],
        "b": [Answer("", 6.0), Answer("no", 4.5)],
        "c": [],
    }
    assert choose(answers) == {"a": "yes", "b": "no", "c": ""}
    assert choose(answers, 0.0) == {"a": "yes", "b": "", "c": ""}
    assert choose(answers, 1.5) == {"a": "yes", "b": "no", "c": ""}
    assert choose(answers, -2.0) == {"a": "", "b": "", "c": ""}


@pytest.mark.parametrize("answer", ["cafe\u0301", "cafe\u200d", "\u00adcafe", "cafe\u00ad"])
def test_a_perfect_model_scores_on_deleted_characters(vocabulary: Vocabulary, answer: str) -> None:
    context = f"We met in the {answer}, again."
    asked = [Question("q", "Where?", context, ((answer, context.index(answer)),))]
    size = {"max_length": 32, "document_stride": 8, "max_query": 4}
    truth = make_features(asked, vocabulary, training=True, **size).arrays
    starts, ends = np.zeros((1, 32)), np.zeros((1, 32))
    starts[0, truth["start_position"]] = ends[0, truth["end_position"]] = 9
    features = make_features(asked, vocabulary, **size)
    predictions = choose(best_answers(asked, features, starts, ends))
    assert evaluate(asked, predictions)["exact_match"] == 100
