"""SQuAD's exact match and F1, as the official evaluation scripts compute them."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from lamb_tpu.data.text.squad import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def evaluate(
    questions: Sequence[Question], predictions: Mapping[str, str], version2: bool = False
) -> dict[str, float]:
    """Scores predictions, question ID -> text, by the best match among a question's answers.

    A question without a prediction scores 0 (the script of v2 leaves it out of the means).
    Predictions for unknown questions are ignored. The correct answer to an impossible question is an
    empty text.

    If `version2` is true, answers that are empty after normalisation, such as "the", are dropped as
    in evaluate-v2.0.py, and a question without remaining answers is impossible.

    Returns:
      `exact_match` and `f1` in percent, means over all questions; and `unanswered`, the number of
      questions without a prediction.
    """
    exact, f1, unanswered = 0, 0.0, 0
    for question in questions:
        if question.id not in predictions:
            unanswered += 1
            continue
        prediction = normalize(predictions[question.id])
        answers = [normalize(text) for text, _ in question.answers]
        if version2:
            answers = [answer for answer in answers if answer]
        # For an impossible question, both measures are 1 if the prediction is empty, otherwise 0.
        if not answers if version2 else question.impossible:
            exact += not prediction
            f1 += not prediction
            continue
        exact += prediction in answers
        f1 += max((_f1(prediction, answer) for answer in answers), default=0.0)
    return {
        "exact_match": 100.0 * exact / len(questions),
        "f1": 100.0 * f1 / len(questions),
        "unanswered": unanswered,
    }


def normalize(text: str) -> str:
    """Lowercases a text, removes ASCII punctuation and English articles, collapses white space.

    Punctuation is removed first, without leaving a space, so "a.m." becomes "am", not an article.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def _f1(prediction: str, answer: str) -> float:
    predicted, expected = prediction.split(), answer.split()
    shared = (Counter(predicted) & Counter(expected)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)
