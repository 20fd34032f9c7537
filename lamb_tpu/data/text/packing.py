"""Packing of text into pre-training examples: pairs of segments, or full sentences.

A plan is made once, from the bounds of sentences only. It holds ranges in the row of all tokens
(`text.shards.TokenShards`), not the tokens. It is a function of (seed, bounds).
"""

from typing import NamedTuple

import numpy as np

from lamb_tpu.data.hashing import below, uniform, words

# Purposes of an example's random words.
_TARGET, _LENGTH, _CUT, _RANDOM, _DOCUMENT, _START, _FRONT_A, _FRONT_B = range(8)


class Pairs(NamedTuple):
    """Segments A and B of each example, as tokens `start` to `start + length - 1`, (examples,)."""

    a_start: np.ndarray  # int64
    a_length: np.ndarray  # int32
    b_start: np.ndarray  # int64
    b_length: np.ndarray  # int32
    is_random: np.ndarray  # bool: B is from another document


class Spans(NamedTuple):
    """The tokens of each example, from `start` to `start + length - 1`, (examples,)."""

    start: np.ndarray  # int64
    length: np.ndarray  # int32


def pack_pairs(
    sentence_starts: np.ndarray,
    document_starts: np.ndarray,
    max_tokens: int,
    seed: int,
    copy: int = 0,
    short_probability: float = 0.1,
) -> Pairs:
    """Packs segments for next-sentence prediction, as `create_pretraining_data.py` of BERT does.

    Sentences are collected until they reach a target length: `max_tokens`, or with
    `short_probability` a random length of 2 ... `max_tokens`. A is a random number of these
    sentences from the first on. B is the rest; or, with probability 1/2 and always if there is no
    rest, sentences from a random place of another random document, and the rest is used again. A
    pair that is too long loses tokens of the longer segment, each from a random end.

    One thing differs: the original draws one target for a whole document. A document as long as a
    book could then give thousands of examples of a few tokens. Here each example draws its own.

    All documents advance together, an example at a time, so that the work is vectorised.

    Args:
      sentence_starts: int64 (sentences + 1,), see `TokenShards`.
      document_starts: int64 (documents + 1,), see `TokenShards`.
      max_tokens: tokens of both segments together, without special tokens; at least 2.
      seed: 0 to 2**64 - 1.
      copy: number of the copy of the text; each copy is packed at random anew.
      short_probability: see above.

    Returns:
      The examples in the order of the documents.

    Raises:
      ValueError: there are fewer than two documents, or `max_tokens` is below 2.
    """
    num_documents = len(document_starts) - 1
    if num_documents < 2 or max_tokens < 2:
        raise ValueError(
            f"need two documents and two tokens, found {num_documents} and {max_tokens}"
        )
    # `place` is the next sentence of each document, `documents` those that are not used up.
    tokens, documents = sentence_starts, np.arange(num_documents)
    place, ends = document_starts[:-1].copy(), document_starts[1:]
    rounds: list[tuple[np.ndarray, ...]] = []
    while len(documents):
        first, end = place[documents], ends[documents]

        def draw(purpose: int) -> np.ndarray:
            return words(seed, copy, documents, first, purpose)

        # The sentences of an example, and how many of them are A. Random numbers depend on (copy,
        # document, first sentence), not on the round.
        is_short = uniform(draw(_TARGET)) < short_probability
        target = np.where(is_short, 2 + below(draw(_LENGTH), max_tokens - 1), max_tokens)
        stop = np.minimum(np.searchsorted(tokens, tokens[first] + target), end)
        count = stop - first
        a_count = np.where(count > 1, 1 + below(draw(_CUT), np.maximum(count - 1, 1)), 1)
        middle = first + a_count
        a_length = tokens[middle] - tokens[first]

        # A random B, from another document.
        is_random = (count == 1) | (uniform(draw(_RANDOM)) < 0.5)
        other = below(draw(_DOCUMENT), num_documents - 1)
        # Skips the document itself, so that all others are equally likely.
        other += other >= documents
        other_first, other_end = document_starts[other], ends[other]
        start = other_first + below(draw(_START), other_end - other_first)
        reached = np.searchsorted(tokens, tokens[start] + target - a_length)
        # At least one sentence, and none of the next document.
        other_stop = np.clip(reached, start + 1, other_end)
        b_first = np.where(is_random, start, middle)
        b_stop = np.where(is_random, other_stop, stop)
        b_length = tokens[b_stop] - tokens[b_first]

        # A pair that is too long is cut at both ends of its segments.
        a_kept, b_kept = _truncate(a_length, b_length, max_tokens)
        a_front = _binomial(draw(_FRONT_A), a_length - a_kept)
        b_front = _binomial(draw(_FRONT_B), b_length - b_kept)
        rounds.append(
            (
                documents,
                tokens[first] + a_front,
                a_kept.astype(np.int32),
                tokens[b_first] + b_front,
                b_kept.astype(np.int32),
                is_random,
            )
        )
        # Sentences that a random B has displaced are used again.
        place[documents] = np.where(is_random, middle, stop)
        documents = documents[place[documents] < end]
    columns = [np.concatenate(column) for column in zip(*rounds)]
    order = np.argsort(columns[0], kind="stable")
    return Pairs(*(column[order] for column in columns[1:]))


def pack_sentences(
    sentence_starts: np.ndarray, document_starts: np.ndarray, max_tokens: int
) -> Spans:
    """Packs full sentences one after the other, across documents, as RoBERTa's FULL-SENTENCES.

    An example holds as many sentences as fit, with one place for a separator after each document
    that ends within it. A sentence too long for an example is cut. Liu et al., arXiv:1907.11692.

    Args:
      sentence_starts, document_starts: see `pack_pairs`.
      max_tokens: tokens of an example, including separators between documents but not those at its
        ends.

    Raises:
      ValueError: `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"need max_tokens >= 1, found {max_tokens}")
    lengths = np.diff(sentence_starts)
    # Sentences longer than an example are cut into pieces of its length; `within` numbers a
    # sentence's pieces.
    pieces = -(-lengths // max_tokens)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = np.repeat(sentence_starts[:-1], pieces) + within * max_tokens
    begins = np.append(begins, sentence_starts[-1])
    # Tokens and separators before each piece, with one separator for each ended document. If an
    # example ends with a document, that document's separator is not needed.
    document_stops = sentence_starts[document_starts[1:]]
    as_start = begins + np.searchsorted(document_stops, begins, side="right")
    as_stop = begins + np.searchsorted(document_stops, begins, side="left")
    starts = []
    piece = 0
    # Each example takes as many pieces as fit, so its start depends on the example before.
    while piece < len(begins) - 1:
        starts.append(piece)
        limit = as_start[piece] + max_tokens
        piece = int(np.searchsorted(as_stop, limit, side="right")) - 1
    bounds = begins[np.array([*starts, len(begins) - 1])]
    return Spans(bounds[:-1], np.diff(bounds).astype(np.int32))


def _truncate(a: np.ndarray, b: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns lengths after cutting single tokens from the longer segment, from B if equal."""
    fits, both = a + b <= total, np.minimum(a, b) > total // 2
    a_cut = np.where(both, (total + 1) // 2, np.where(a > b, total - b, a))
    b_cut = np.where(both, total // 2, np.where(a > b, b, total - a))
    return np.where(fits, a, a_cut), np.where(fits, b, b_cut)


def _binomial(random_words: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """Draws binomial numbers of `trials` fair coins: the ones among as many random bits."""
    ones = np.zeros(len(trials), np.int64)
    for number in range(-(-int(trials.max(initial=0)) // 64)):
        bits = np.clip(trials - 64 * number, 0, 64)
        # A shift by all 64 bits is undefined, so a place without trials is masked instead.
        kept = words(number, random_words) >> (64 - np.maximum(bits, 1)).astype(np.uint64)
        ones += np.where(bits > 0, np.bitwise_count(kept), 0)
    return ones
