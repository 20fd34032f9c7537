"""Packing of text into pre-training examples: pairs of segments, or full sentences.

Packing is done once, from the sentence bounds only. The result has ranges of the concatenated tokens
(`text.shards.TokenShards`), not the tokens, and is a function of (seed, bounds).
"""

from typing import NamedTuple

import numpy as np

from lamb_tpu.data.hashing import below, uniform, words

# Purposes of an example's random 64-bit words; numbers for different purposes are independent.
_TARGET, _LENGTH, _CUT, _RANDOM, _DOCUMENT, _START, _FRONT_A, _FRONT_B = range(8)


class Pairs(NamedTuple):
    """Segments A and B of each example: tokens `start` to `start + length - 1`; all arrays (examples,)."""

    a_start: np.ndarray  # int64
    a_length: np.ndarray  # int32
    b_start: np.ndarray  # int64
    b_length: np.ndarray  # int32
    is_random: np.ndarray  # bool: B is from another document


class Spans(NamedTuple):
    """Tokens of each example: `start` to `start + length - 1`; both arrays (examples,)."""

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
    """Packs segments for next-sentence prediction, as BERT's `create_pretraining_data.py` does.

    Sentences are collected until they have a target length in tokens, for both segments together:
    `max_tokens`, or, with probability `short_probability`, a random length of 2 ... `max_tokens`.
    Segment A is a random number of these sentences, starting with the first. With probability 1/2,
    segment B is the remaining sentences. Otherwise, and always if no sentences remain, B is sentences
    from a random position in another random document, and the remaining sentences are used for the
    next example. A pair that is too long loses tokens one by one, at a random end of the longer segment.

    There is one difference: the original draws one target length for each document, so a book with a
    short target gives thousands of examples of a few tokens. Here a target is drawn for each example.

    All documents advance together, one example at a time, so that the work is vectorised. The
    examples are returned in the order of the documents. There must be at least two documents. Each
    `copy` of the text is packed differently. `sentence_starts` and `document_starts` are those of
    `TokenShards`.
    """
    num_documents = len(document_starts) - 1
    # `next_sentence` has an index for each document; `documents` lists those with sentences left.
    tokens, documents = sentence_starts, np.arange(num_documents)
    next_sentence, ends = document_starts[:-1].copy(), document_starts[1:]
    rounds: list[tuple[np.ndarray, ...]] = []
    while len(documents):
        first, end = next_sentence[documents], ends[documents]

        def draw(purpose: int) -> np.ndarray:
            return words(seed, copy, documents, first, purpose)

        # The sentences of an example, and how many of them belong to A. The random numbers depend
        # on (copy, document, first sentence), not on the round.
        is_short = uniform(draw(_TARGET)) < short_probability
        target = np.where(is_short, 2 + below(draw(_LENGTH), max_tokens - 1), max_tokens)
        stop = np.minimum(np.searchsorted(tokens, tokens[first] + target), end)
        count = stop - first
        a_count = np.where(count > 1, 1 + below(draw(_CUT), np.maximum(count - 1, 1)), 1)
        middle = first + a_count
        a_length = tokens[middle] - tokens[first]

        # A random B from another document.
        is_random = (count == 1) | (uniform(draw(_RANDOM)) < 0.5)
        other = below(draw(_DOCUMENT), num_documents - 1)
        # Skips the document itself; all others stay equally likely.
        other += other >= documents
        other_first, other_end = document_starts[other], ends[other]
        start = other_first + below(draw(_START), other_end - other_first)
        reached = np.searchsorted(tokens, tokens[start] + target - a_length)
        # B has at least one sentence, and no sentence of the document after `other`.
        other_stop = np.clip(reached, start + 1, other_end)
        b_first = np.where(is_random, start, middle)
        b_stop = np.where(is_random, other_stop, stop)
        b_length = tokens[b_stop] - tokens[b_first]

        # If a pair is too long, cuts its segments at both ends.
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
        # If B is random, the sentences after A are used again.
        next_sentence[documents] = np.where(is_random, middle, stop)
        documents = documents[next_sentence[documents] < end]
    columns = [np.concatenate(column) for column in zip(*rounds)]
    order = np.argsort(columns[0], kind="stable")
    return Pairs(*(column[order] for column in columns[1:]))


def pack_sentences(
    sentence_starts: np.ndarray, document_starts: np.ndarray, max_tokens: int
) -> Spans:
    """Packs full sentences one after the other, across documents, as in RoBERTa's FULL-SENTENCES.

    An example holds as many sentences as fit, with a separator after each document that ends within
    the example. A sentence too long for an example is cut. `max_tokens` includes the separators
    between documents but not the special tokens at the ends. Liu et al., arXiv:1907.11692.
    """
    lengths = np.diff(sentence_starts)
    # Cuts sentences longer than an example into segments of `max_tokens`; `within` numbers the
    # segments of a sentence.
    segments = -(-lengths // max_tokens)
    within = np.arange(segments.sum()) - np.repeat(np.cumsum(segments) - segments, segments)
    begins = np.repeat(sentence_starts[:-1], segments) + within * max_tokens
    begins = np.append(begins, sentence_starts[-1])
    # Tokens and separators before each segment; each ended document adds a separator. An example
    # that ends with a document does not need that document's separator.
    document_stops = sentence_starts[document_starts[1:]]
    as_start = begins + np.searchsorted(document_stops, begins, side="right")
    as_stop = begins + np.searchsorted(document_stops, begins, side="left")
    starts = []
    segment = 0
    # Each example takes as many segments as fit, so its start depends on the example before.
    while segment < len(begins) - 1:
        starts.append(segment)
        limit = as_start[segment] + max_tokens
        segment = int(np.searchsorted(as_stop, limit, side="right")) - 1
    bounds = begins[np.array([*starts, len(begins) - 1])]
    return Spans(bounds[:-1], np.diff(bounds).astype(np.int32))


def _truncate(a: np.ndarray, b: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns both lengths after cutting tokens one by one from the longer segment (B if equal)."""
    fits, both = a + b <= total, np.minimum(a, b) > total // 2
    a_cut = np.where(both, (total + 1) // 2, np.where(a > b, total - b, a))
    b_cut = np.where(both, total // 2, np.where(a > b, b, total - a))
    return np.where(fits, a, a_cut), np.where(fits, b, b_cut)


def _binomial(random_words: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """Draws binomial numbers with p = 1/2, by counting the ones among `trials` random bits."""
    ones = np.zeros(len(trials), np.int64)
    for number in range(-(-int(trials.max(initial=0)) // 64)):
        bits = np.clip(trials - 64 * number, 0, 64)
        # A shift by all 64 bits is undefined, so entries without trials are masked instead.
        used_bits = words(number, random_words) >> (64 - np.maximum(bits, 1)).astype(np.uint64)
        ones += np.where(bits > 0, np.bitwise_count(used_bits), 0)
    return ones
