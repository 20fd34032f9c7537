"""SQuAD: its JSON files, and features of fixed length, with windows over long contexts.

Rajpurkar et al., arXiv:1606.05250 (v1.1) and arXiv:1806.03822 (v2, with unanswerable questions).
The features equal those of BERT's `run_squad.py`.
"""

import pathlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from tokenizers import Encoding

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer
from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading, schema

# A context with this many (window, token) pairs or more is rejected; each pair takes 40 bytes.
_MOST_PAIRS = 2**24


class _Answer(msgspec.Struct):
    text: str
    answer_start: int


class _Item(msgspec.Struct):
    id: str
    question: str
    answers: list[_Answer] = []
    is_impossible: bool = False


class _Paragraph(msgspec.Struct):
    context: str
    qas: list[_Item]


class _Article(msgspec.Struct):
    paragraphs: list[_Paragraph]


class _File(msgspec.Struct):
    """A SQuAD file; other keys, such as its version, are ignored."""

    data: list[_Article]


@dataclass(frozen=True)
class Question:
    """A question about a context.

    `answers` has the text of each answer and the index of its first character in the context; in
    test files, `answers` is ().
    """

    id: str  # the key of the prediction; unique in the data set
    text: str
    context: str  # the paragraph with the answer
    answers: tuple[tuple[str, int], ...]
    impossible: bool = False  # whether the context has no answer (v2)


@dataclass(frozen=True)
class Features:
    """Windows over questions and their contexts: [CLS] question [SEP] context [SEP] [PAD] ...

    Attributes:
      arrays: (features, length): `input_ids` and `token_type_ids` int32, `attention_mask` bool; for
        training also `start_position` and `end_position`, int32 (features,): the first and last
        token of the answer, both 0 if the window lacks the answer.
      question: int32 (features,): index of each window's question, ascending.
      char_start, char_stop: int32 (features, length): range of each token's characters in the
        context, including adjacent characters that are deleted (see `_with_deleted`); -1
        for tokens outside the context.
      best_window: bool (features, length): whether this window has the most context around the
        token, among all windows with the token. Answers begin only at such tokens, and count once.
      unmappable: ids of questions left out of training, because their answer is not at the position
        given in the file, or has no token.
    """

    arrays: dict[str, np.ndarray]
    question: np.ndarray
    char_start: np.ndarray
    char_stop: np.ndarray
    best_window: np.ndarray
    unmappable: tuple[str, ...]


def read_questions(path: str | pathlib.Path) -> list[Question]:
    """Reads all questions of a SQuAD file, in order; raises a UserError if the file is not valid."""
    try:
        content = reading.read_json(path, reading.MAX_TEXT_BYTES)
    except OSError as error:
        raise unreadable(path, error, "give a readable file of questions") from error
    except ValueError as error:
        raise unreadable(path, error, "give a SQuAD file", "is not a SQuAD file") from error
    file = schema.convert(content, _File, f"{path} is not a SQuAD file")
    questions = [
        Question(
            id=item.id,
            text=item.question,
            context=paragraph.context,
            answers=tuple((answer.text, answer.answer_start) for answer in item.answers),
            impossible=item.is_impossible,
        )
        for article in file.data
        for paragraph in article.paragraphs
        for item in paragraph.qas
    ]
    if not questions:
        raise UserError(path, ..., "has no question", "give another file")
    seen = set[str]()
    for question in questions:
        # Predictions are stored by id, so ids must be unique.
        if question.id in seen:
            problem = f"has the question {question.id} twice"
            raise UserError(path, ..., problem, "remove one of them")
        seen.add(question.id)
        for what, text in (("text", question.text), ("context", question.context)):
            # JSON can hold half of a surrogate pair, which tokenizers reject.
            if re.search("[\ud800-\udfff]", text):
                key = f"the {what} of question {question.id} in {path}"
                problem = "has an unpaired surrogate, one of \\ud800 to \\udfff"
                raise UserError(key, ..., problem, "remove it")
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
    """Makes windows of `max_length` tokens, one every `document_stride` tokens of a context.

    Args:
      questions, vocabulary: the questions, and the vocabulary of the tokenizer.
      cased: whether the vocabulary keeps case and accents.
      training: whether to add the positions of each question's first answer, and to leave out
        questions whose answer cannot be located.
      max_length: number of tokens in a window, including special tokens and padding.
      document_stride: number of context tokens from the start of a window to the start of the next.
      max_query: maximum number of the question's tokens; further tokens are dropped.

    Raises:
      UserError: no tokens remain for the context, a question for training has no answer, or no
        question is left.
    """
    # The context tokens that fit into a window besides the longest question and 3 special tokens.
    max_context = max_length - max_query - 3
    if min(max_context, document_stride, max_query) < 1 or document_stride > max_context:
        problem = f"does not fit into max_length={max_length} beside max_query={max_query}"
        remedy = f"use 1 to {max_context}" if max_context > 0 else "use a larger max_length"
        raise UserError("document_stride", document_stride, problem, remedy)
    tokenizer = make_tokenizer(vocabulary, cased)
    # Many questions share a context, so each context is tokenized once.
    texts = list(dict.fromkeys(question.context for question in questions))
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    contexts = {text: _Context(text, item) for text, item in zip(texts, encoded)}
    queries = tokenizer.encode_batch([q.text for q in questions], add_special_tokens=False)
    made: list[dict[str, np.ndarray]] = []
    unmappable = []
    for number, (question, query) in enumerate(zip(questions, queries)):
        context = contexts[question.context]
        span = None
        # Impossible questions are trained on too, with both positions at [CLS].
        if training and not question.impossible:
            span = _answer_span(question, context)
            if span is None:
                unmappable.append(question.id)
                continue
        fields = _windows(
            query.ids[:max_query],
            context,
            vocabulary,
            max_length=max_length,
            stride=document_stride,
            name=question.text[:40],
            span=span,
        )
        made.append({**fields, "question": np.full(len(fields["input_ids"]), number, np.int32)})
    if unmappable and not made:
        problem = f"has no answer at the position in the file (the first id is {unmappable[0]})"
        remedy = "correct the file"
        raise UserError(f"every question ({len(unmappable):,} in all)", ..., problem, remedy)
    if not made:
        raise UserError("the file", ..., "has no question to make features of", "give another file")
    arrays = {key: np.concatenate([fields[key] for fields in made]) for key in made[0]}
    if not training:
        del arrays["start_position"], arrays["end_position"]
    # These arrays map tokens back to text on the host; they are not fields of a batch.
    host = {key: arrays.pop(key) for key in ("question", "char_start", "char_stop", "best_window")}
    return Features(arrays, **host, unmappable=tuple(unmappable))


class _Context:
    """Tokens of a context: ids, ranges of characters, and ranges extended by `_with_deleted`."""

    def __init__(self, text: str, encoded: Encoding) -> None:
        self.ids = np.array(encoded.ids, np.int32)
        offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
        self.char_start, self.char_stop = offsets[:, 0], offsets[:, 1]
        self.text_start, self.text_stop = _with_deleted(text, offsets)


def _with_deleted(text: str, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Extends the tokens' ranges over adjacent characters that the normaliser deletes.

    Otherwise an answer that begins or ends with such a character, such as a joiner or the accent of
    a decomposed letter, would lose the character when the answer is mapped back to text. Combining
    marks belong to the character before them and never begin a range.
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


def _answer_span(question: Question, context: _Context) -> tuple[int, int] | None:
    """Returns the first and last token of the first answer; None if the context lacks the answer."""
    if not question.answers:
        remedy = "remove it, or set its is_impossible to true if the context has no answer"
        raise UserError(f"question {question.id}", ..., "has no answer to train on", remedy)
    text, start = question.answers[0]
    stop = start + len(text)
    if not text or start < 0 or question.context[start:stop] != text:
        return None
    # `first` is the first token that ends after the answer's start, `last` the last token that begins
    # before the answer's end.
    first = int(np.searchsorted(context.char_stop, start, side="right"))
    last = int(np.searchsorted(context.char_start, stop, side="left")) - 1
    return (first, last) if first <= last else None


def _windows(
    query_ids: list[int],
    context: _Context,
    vocabulary: Vocabulary,
    *,
    max_length: int,
    stride: int,
    name: str,
    span: tuple[int, int] | None,
) -> dict[str, np.ndarray]:
    """Makes the windows of a question; `span` is the answer's first and last token, if any."""
    # The context begins after [CLS], the question and [SEP].
    offset = len(query_ids) + 2
    max_context, num_tokens = max_length - offset - 1, len(context.ids)
    # Windows start a stride apart, until one reaches the end of the context.
    firsts = np.arange(1 + max(0, -(-(num_tokens - max_context) // stride))) * stride
    if len(firsts) * num_tokens >= _MOST_PAIRS:
        problem = f"has a context of {num_tokens:,} tokens, too many for document_stride={stride}"
        remedy = "cut the context into several, or use a larger document_stride"
        raise UserError(f"the question that begins {name!r}", ..., problem, remedy)
    sizes = np.minimum(max_context, num_tokens - firsts)
    columns, numbers = np.arange(max_length), np.arange(len(firsts))
    stops = offset + sizes[:, None]  # the columns of the last [SEP]
    in_context = (columns >= offset) & (columns < stops)
    tokens = (firsts[:, None] + columns - offset)[in_context]

    def spread(values: np.ndarray, elsewhere: int) -> np.ndarray:
        spread_out = np.full(in_context.shape, elsewhere, np.int32)
        spread_out[in_context] = values[tokens]
        return spread_out

    ids = spread(context.ids, vocabulary.pad_id)
    ids[:, :offset] = [vocabulary.cls_id, *query_ids, vocabulary.sep_id]
    ids[numbers, stops[:, 0]] = vocabulary.sep_id
    best = _best_windows(firsts, sizes, num_tokens)
    first, last = span or (-1, -1)
    has_answer = (first >= firsts) & (last < firsts + sizes)
    return {
        "input_ids": ids,
        "token_type_ids": ((columns >= offset) & (columns <= stops)).astype(np.int32),
        "attention_mask": columns <= stops,
        "char_start": spread(context.text_start, -1),
        "char_stop": spread(context.text_stop, -1),
        "best_window": spread(best, -1) == numbers[:, None],
        "start_position": np.where(has_answer, first - firsts + offset, 0).astype(np.int32),
        "end_position": np.where(has_answer, last - firsts + offset, 0).astype(np.int32),
    }


def _best_windows(firsts: np.ndarray, sizes: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns for each token the window with the most context on the token's shorter side."""
    tokens = np.arange(num_tokens)
    left = tokens - firsts[:, None]
    right = (firsts + sizes)[:, None] - 1 - tokens
    # `run_squad.py` adds a hundredth of the window's size, which favours long windows.
    score = np.minimum(left, right) + 0.01 * sizes[:, None]
    return np.where((left < 0) | (right < 0), -1.0, score).argmax(0)
