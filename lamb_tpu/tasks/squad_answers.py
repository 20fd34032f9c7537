"""Finds the best answers, as texts, from the start and end logits of windows."""

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
    """Returns the best distinct answers to each question, as BERT's `run_squad.py` does.

    In each window, the `num_best` likeliest start tokens are combined with the `num_best` likeliest
    end tokens. A pair counts if both tokens are in the context, the end is not before the start, the
    answer has at most `max_answer_length` tokens, and the window is the best one for the start token.
    The text is the range of the context from the first character of the start token to the last
    character of the end token, with white space collapsed. (`run_squad.py` searches for the tokens in
    the full words that contain them. The texts are the same, unless that search matches an earlier
    occurrence, or fails and returns full words.)

    Args:
      questions, features: the questions, and the features made from them.
      start_logits, end_logits: (features, length), any float dtype.
      num_best: maximum number of answers for a question.
      max_answer_length: maximum number of tokens of an answer.
      with_null: whether to rank the answer "" too (SQuAD v2), by its lowest [CLS] score in any window.

    Returns:
      question ID -> answers, best first; the list is empty if no pair counts.
    """
    # First collects the pairs of each question's windows: (score, first, last character).
    pairs: list[list[tuple[float, int, int]]] = [[] for _ in questions]
    nulls = np.full(len(questions), np.inf)
    for window, number in enumerate(features.question):
        starts, ends = start_logits[window].astype(float), end_logits[window].astype(float)
        # Token 0 is [CLS]; its score means that the window has no answer.
        nulls[number] = min(nulls[number], starts[0] + ends[0])
        # `first` is a column and `last` a row, so that both broadcast to (starts, ends). The stable
        # sort puts the earlier of equal logits first, as in the original.
        first = np.argsort(-starts, kind="stable")[:num_best, None]
        last = np.argsort(-ends, kind="stable")[None, :num_best]
        char_start, char_stop = features.char_start[window], features.char_stop[window]
        is_context = char_start >= 0
        counts = (
            is_context[first]
            & is_context[last]
            & features.best_window[window][first]
            & (first <= last)
            & (last - first < max_answer_length)
        )
        # `np.nonzero` goes row by row, like the original's loops; this decides between equal scores.
        rows, columns = np.nonzero(counts)
        pairs[number] += [
            (starts[i] + ends[j], char_start[i], char_stop[j])
            for i, j in zip(first[rows, 0], last[0, columns])
        ]
    # Then selects the best distinct texts of each question.
    answers = {}
    for number, question in enumerate(questions):
        if with_null:
            # An empty range of characters gives the text "".
            pairs[number].append((float(nulls[number]), 0, 0))
        texts: dict[str, float] = {}
        for score, start, stop in sorted(pairs[number], key=lambda item: -item[0]):
            if len(texts) == num_best:
                break
            # The first of equal texts has the highest score.
            texts.setdefault(" ".join(question.context[start:stop].split()), float(score))
        # `choose` needs this score even if it is not among the best.
        if with_null and "" not in texts:
            texts[""] = float(nulls[number])
        answers[question.id] = [Answer(text, score) for text, score in texts.items()]
    return answers


def choose(answers: dict[str, list[Answer]], null_threshold: float | None = None) -> dict[str, str]:
    """Returns the predictions, question ID -> text, from the result of `best_answers`.

    For SQuAD v2, "" is chosen if its score exceeds the best text's score by more than
    `null_threshold`. Without a threshold, "" is chosen only if there is no text.
    """
    predictions = {}
    for question_id, candidates in answers.items():
        texts = [answer for answer in candidates if answer.text]
        null = [answer.score for answer in candidates if not answer.text]
        if texts and null and null_threshold is not None:
            texts = [] if null[0] - texts[0].score > null_threshold else texts
        predictions[question_id] = texts[0].text if texts else ""
    return predictions
