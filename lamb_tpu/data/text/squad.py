"""SQuAD: its JSON files, and features of fixed length, with windows over long contexts.

Rajpurkar et al., arXiv:1606.05250 (v1.1) and arXiv:1806.03822 (v2, with questions that have no
answer). The features are those of `run_squad.py` of BERT.
"""

import json
import pathlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer
from lamb_tpu.errors import UserError
from lamb_tpu.files import reading

KindT = TypeVar("KindT", str, int, bool, list)
_KINDS = {str: "a string", int: "a whole number", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
      id: id in the data set, which names the prediction.
      text: the question.
      context: the paragraph with the answer.
      answers: (text, index of its first character in the context) of each answer; none in test
        files.
      impossible: v2: whether the context has no answer.
    """

    id: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]
    impossible: bool = False


@dataclass(frozen=True)
class Features:
    """Windows over questions and their contexts: [CLS] question [SEP] context [SEP] [PAD] ...

    Attributes:
      arrays: (features, length): `input_ids` and `token_type_ids` int32, `attention_mask` bool; for
        training also `start_position` and `end_position`, int32 (features,): the first and last
        token of the answer, both 0 if it is not in the window.
      question: int32 (features,): index of each window's question, ascending.
      char_start, char_stop: int32 (features, length): range of each token's characters in the
        context, with adjacent characters that the normaliser deletes (see `_with_deleted`); -1
        for tokens outside the context.
      best_window: bool (features, length): whether this window has the most context around the
        token, of all windows with it. Answers begin at such tokens only, so that each counts once.
      unmappable: ids of questions left out of training, because the text of their answer is not
        where the file says, or has no token.
    """

    arrays: dict[str, np.ndarray]
    question: np.ndarray
    char_start: np.ndarray
    char_stop: np.ndarray
    best_window: np.ndarray
    unmappable: tuple[str, ...]


def read_questions(path: str | pathlib.Path) -> list[Question]:
    """Reads all questions of a SQuAD file, in order.

    Raises:
      UserError: there is no such file, it is not a SQuAD file, it has no question or an id twice,
        or a value has another type, such as null for a text.
    """
    try:
        articles = reading.read_json(path)["data"]
        questions = [
            _question(item, paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"]
            for item in paragraph["qas"]
        ]
    except OSError as error:
        raise UserError(f"the questions {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is no SQuAD file, JSON with data > paragraphs > context and qas ({told})"
        ) from error
    if not questions:
        raise UserError(f"{path} has no question")
    seen = set[str]()
    for question in questions:
        # The id names the prediction, so it must be unique.
        if question.id in seen:
            raise UserError(f"{path} has the question {question.id} twice")
        seen.add(question.id)
    return questions


def make_features(
    questions: Sequence[Question],
    vocabulary: Vocabulary,
    *,
    cased: bool = False,
    training: bool = False,
    max_length: int = 384,
    document_stride: int = 128,
    max_query: int = 64,
) -> Features:
    """Makes windows of `max_length` tokens over each context, `document_stride` tokens apart.

    Args:
      questions: the questions.
      vocabulary: the vocabulary.
      cased: whether the vocabulary keeps case and accents.
      training: add the positions of each question's first answer, and leave out the questions
        whose answer cannot be found.
      max_length: tokens of a feature, including special tokens and padding.
      document_stride: tokens of the context from the start of a window to that of the next.
      max_query: number of the question's tokens that are kept.

    Raises:
      UserError: the lengths leave no room, a question for training has no answer, or no question
        is left.
    """
    # The least context of a window, beside the longest question and three special tokens.
    room = max_length - max_query - 3
    if min(room, document_stride, max_query) < 1 or document_stride > room:
        raise UserError(
            f"max_length = {max_length} leaves {room} tokens of context beside max_query = "
            f"{max_query} and three special tokens; document_stride = {document_stride} must be "
            "at least 1 and at most that"
        )
    tokenizer = make_tokenizer(vocabulary, cased)
    # Many questions share a context, which is tokenized once.
    texts = list(dict.fromkeys(question.context for question in questions))
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    contexts = {text: _Context(text, item) for text, item in zip(texts, encoded)}
    queries = tokenizer.encode_batch([q.text for q in questions], add_special_tokens=False)
    rows: list[dict[str, np.ndarray | int]] = []
    unmappable = []
    for number, (question, query) in enumerate(zip(questions, queries)):
        context = contexts[question.context]
        span = None
        # A question without an answer is trained on too, with both positions at [CLS].
        if training and not question.impossible:
            span = _answer_span(question, context)
            if span is None:
                unmappable.append(question.id)
                continue
        query_ids = query.ids[:max_query]
        for row in _windows(query_ids, context, vocabulary, max_length, document_stride):
            if training:
                row.update(_positions(span, row.pop("first"), row.pop("size"), len(query_ids) + 2))
            else:
                del row["first"], row["size"]
            rows.append({**row, "question": number})
    if unmappable and not rows:
        raise UserError(
            f"none of the {len(unmappable):,} questions can be trained on: their answers do not "
            f"stand in the contexts where the file says; the first is {unmappable[0]}"
        )
    if not rows:
        raise UserError("there is no question to make features of")
    # A row is one window; all rows have the same keys.
    stacked = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    for key in ("start_position", "end_position", "question"):
        if key in stacked:
            stacked[key] = stacked[key].astype(np.int32)
    # These lead from tokens back to text, on the host; they are no fields of a batch.
    apart = {
        key: stacked.pop(key) for key in ("question", "char_start", "char_stop", "best_window")
    }
    return Features(stacked, **apart, unmappable=tuple(unmappable))


class _Context:
    """Tokens of a context.

    Attributes:
      ids: ids of the tokens.
      char_start, char_stop: range of each token's characters, as the tokenizer reports it.
      text_start, text_stop: the same range with adjacent deleted characters, see `_with_deleted`.
    """

    def __init__(self, text: str, encoded: Encoding) -> None:
        self.ids = np.array(encoded.ids, np.int32)
        offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
        self.char_start, self.char_stop = offsets[:, 0], offsets[:, 1]
        self.text_start, self.text_stop = _with_deleted(text, offsets)


def _with_deleted(text: str, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Extends the tokens' ranges over adjacent characters that belong to no token.

    The normaliser deletes accents of decomposed text, joiners, soft hyphens, variation selectors
    and control characters. An answer that ends or begins with one of them would lose it on the way
    back to text. So a token's range ends before the next token or space, and begins after the
    previous one. Combining marks belong to the character before them and never begin a range.
    """
    starts, stops = offsets[:, 0].copy(), offsets[:, 1].copy()
    is_deleted = np.array([not character.isspace() for character in text], bool)
    for start, stop in offsets.tolist():
        is_deleted[start:stop] = False
    if not is_deleted.any():
        return starts, stops
    for token, (start, stop) in enumerate(offsets.tolist()):
        while stop < len(text) and is_deleted[stop]:
            stop += 1
        while start and is_deleted[start - 1]:
            start -= 1
        while start < starts[token] and unicodedata.category(text[start]).startswith("M"):
            start += 1
        starts[token], stops[token] = start, stop
    return starts, stops


def _question(item: dict[str, Any], context: Any) -> Question:
    name = _of_kind(item["id"], str, "an id")
    of = f"of question {name}"
    answers = tuple(
        (
            _of_kind(answer["text"], str, f"the text of an answer {of}"),
            _of_kind(answer["answer_start"], int, f"the answer_start of an answer {of}"),
        )
        for answer in _of_kind(item.get("answers", []), list, f"the list of answers {of}")
    )
    return Question(
        name,
        _of_kind(item["question"], str, f"the text {of}"),
        _of_kind(context, str, f"the context {of}"),
        answers,
        _of_kind(item.get("is_impossible", False), bool, f"is_impossible {of}"),
    )


def _of_kind(value: Any, kind: type[KindT], what: str) -> KindT:
    """Returns the value, or raises ValueError if it has another type; a bool is not a number."""
    if type(value) is not kind:
        raise ValueError(f"{what} is {json.dumps(value)[:40]}, which must be {_KINDS[kind]}")
    return value


def _answer_span(question: Question, context: _Context) -> tuple[int, int] | None:
    """Returns the context's first and last token of the first answer, or None."""
    if not question.answers:
        raise UserError(f"question {question.id} has no answer to train on")
    text, start = question.answers[0]
    stop = start + len(text)
    if not text or start < 0 or question.context[start:stop] != text:
        return None
    # The first token that ends after the answer's first character, and the last that begins before
    # its end.
    first = int(np.searchsorted(context.char_stop, start, side="right"))
    last = int(np.searchsorted(context.char_start, stop, side="left")) - 1
    return (first, last) if first <= last else None


def _positions(span: tuple[int, int] | None, first: int, size: int, offset: int) -> dict[str, int]:
    """Returns the answer's positions in a window over tokens `first` ... `first + size - 1`."""
    if span is None or span[0] < first or span[1] >= first + size:
        return {"start_position": 0, "end_position": 0}
    return {"start_position": span[0] - first + offset, "end_position": span[1] - first + offset}


def _windows(
    query_ids: list[int], context: _Context, vocabulary: Vocabulary, max_length: int, stride: int
) -> list[dict[str, Any]]:
    room = max_length - len(query_ids) - 3
    num_tokens = len(context.ids)
    firsts = [0]
    # Windows start a stride apart, until one reaches the end of the context.
    while firsts[-1] + room < num_tokens:
        firsts.append(firsts[-1] + stride)
    sizes = [min(room, num_tokens - first) for first in firsts]
    best = _best_windows(np.array(firsts), np.array(sizes), num_tokens)
    # The context begins behind [CLS], the question and [SEP].
    offset = len(query_ids) + 2
    rows = []
    for number, (first, size) in enumerate(zip(firsts, sizes)):
        inside = slice(first, first + size)
        ids = np.full(max_length, vocabulary.pad_id, np.int32)
        head = [vocabulary.cls_id, *query_ids, vocabulary.sep_id]
        ids[:offset] = head
        ids[offset : offset + size] = context.ids[inside]
        ids[offset + size] = vocabulary.sep_id
        columns = np.arange(max_length)
        is_context = (columns >= offset) & (columns < offset + size)
        row = {
            "input_ids": ids,
            "token_type_ids": (is_context | (columns == offset + size)).astype(np.int32),
            "attention_mask": columns <= offset + size,
            "char_start": np.full(max_length, -1, np.int32),
            "char_stop": np.full(max_length, -1, np.int32),
            "best_window": np.zeros(max_length, bool),
            "first": first,
            "size": size,
        }
        row["char_start"][is_context] = context.text_start[inside]
        row["char_stop"][is_context] = context.text_stop[inside]
        row["best_window"][is_context] = (best == number)[inside]
        rows.append(row)
    return rows


def _best_windows(firsts: np.ndarray, sizes: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns for each token the window with the most context on the token's shorter side."""
    tokens = np.arange(num_tokens)
    left = tokens - firsts[:, None]
    right = (firsts + sizes)[:, None] - 1 - tokens
    # As in the original, a hundredth of the window's size is added, which favours long windows.
    score = np.minimum(left, right) + 0.01 * sizes[:, None]
    return np.where((left < 0) | (right < 0), -1.0, score).argmax(0)
