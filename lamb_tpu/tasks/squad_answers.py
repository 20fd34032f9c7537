"""Texts of answers, best first, from the start and end logits of windows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamb_tpu.data.text.squad import Features, Question


class Answer(NamedTuple):
    """A candidate answer: its text, and its score, the sum of a start and an end logit."""

    text: str
    score: float


def best_answers(
    questions: Sequence[Question],
    features: Features,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    *,
    num_best: int = 20,
    max_answer_length: int = 30,
    with_null: bool = False,
) -> dict[str, list[Answer]]:
    """Returns the best distinct answers to each question, as `run_squad.py` of BERT does.

    In each window the `num_best` highest starts and ends are paired. A pair counts if both are in
    the context, the end is not before the start, the answer has at most `max_answer_length` tokens,
    and the window is the best one for its start. The text is the part of the context from the first
    character of the first token to the last character of the last, with white space collapsed. (The
    original searches for the tokens in the words around them. The texts are the same unless it
    finds an earlier occurrence, or finds nothing and keeps whole words.)

    Args:
      questions: the questions from which the features were made.
      features: the features of all questions.
      start_logits, end_logits: (features, length), any float dtype.
      num_best: number of answers to keep.
      max_answer_length: the longest answer, in tokens.
      with_null: for v2: the answer "" competes, with the lowest score of [CLS] over the windows.

    Returns:
      id -> answers, best first; the list is empty if no pair counts.
    """
    # First the pairs of each question's windows, as (score, window, first token, last token).
    found: list[list[tuple[float, int, int, int]]] = [[] for _ in questions]
    nulls = np.full(len(questions), np.inf)
    for window, number in enumerate(features.question):
        starts, ends = start_logits[window].astype(float), end_logits[window].astype(float)
        # Token 0 is [CLS], which marks that the window has no answer.
        nulls[number] = min(nulls[number], starts[0] + ends[0])
        # `first` is a column and `last` a row, so that expressions of both are (starts, ends). A
        # stable sort puts the earlier of equal logits first, as in the original.
        first = np.argsort(-starts, kind="stable")[:num_best, None]
        last = np.argsort(-ends, kind="stable")[None, :num_best]
        is_context = features.char_start[window] >= 0
        counts = (
            is_context[first]
            & is_context[last]
            & features.best_window[window][first]
            & (first <= last)
            & (last - first < max_answer_length)
        )
        # Row by row: the order of the original's loops, which decides between equal scores.
        rows, columns = np.nonzero(counts)
        found[number] += [
            (starts[i] + ends[j], window, int(i), int(j))
            for i, j in zip(first[rows, 0], last[0, columns])
        ]
    # Then the best distinct texts of each question.
    answers = {}
    for number, question in enumerate(questions):
        candidates = [
            (score, features.char_start[window, i], features.char_stop[window, j])
            for score, window, i, j in found[number]
        ]
        if with_null:
            # An empty range of characters gives the text "".
            candidates.append((float(nulls[number]), 0, 0))
        texts: dict[str, float] = {}
        for score, start, stop in sorted(candidates, key=lambda item: -item[0]):
            if len(texts) == num_best:
                break
            # The first of equal texts has the highest score.
            texts.setdefault(" ".join(question.context[start:stop].split()), float(score))
        # `choose` needs this score, even if it is not among the best.
        if with_null and "" not in texts:
            texts[""] = float(nulls[number])
        answers[question.id] = [Answer(text, score) for text, score in texts.items()]
    return answers


def choose(answers: dict[str, list[Answer]], null_threshold: float | None = None) -> dict[str, str]:
    """Returns the predictions, id -> text, in the form of the official script.

    Args:
      answers: the result of `best_answers`.
      null_threshold: for v2: choose "" if its score exceeds that of the best text by more than
        this. None chooses "" only if there is no text.
    """
    predictions = {}
    for question_id, candidates in answers.items():
        texts = [answer for answer in candidates if answer.text]
        null = [answer.score for answer in candidates if not answer.text]
        chosen = texts[0].text if texts else ""
        if texts and null and null_threshold is not None:
            chosen = "" if null[0] - texts[0].score > null_threshold else chosen
        predictions[question_id] = chosen
    return predictions
