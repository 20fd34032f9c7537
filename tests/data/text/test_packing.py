"""Packing: equal to BERT's loops in plain Python; probabilities of the random choices."""

import random

import numpy as np
import pytest

from lamb_tpu.data import hashing
from lamb_tpu.data.text import packing

Document = list[list[int]]


def made_up(num_documents: int, longest: int, seed: int) -> list[Document]:
    """Makes documents of sentences; each token is its index in the text."""
    rng = random.Random(seed)
    number = iter(range(10**9))
    return [
        [[next(number) for _ in range(rng.randint(1, 30))] for _ in range(rng.randint(1, longest))]
        for _ in range(num_documents)
    ]


def bounds(documents: list[Document]) -> tuple[np.ndarray, np.ndarray]:
    sentences = [len(sentence) for document in documents for sentence in document]
    return np.cumsum([0, *sentences]), np.cumsum([0, *map(len, documents)])


def plain_pairs(
    documents: list[Document], max_tokens: int, seed: int, copy: int, short: float
) -> list[tuple[list[int], list[int], bool]]:
    """BERT's `create_instances_from_document`, with a separate target length for each example."""
    examples, firsts = [], np.cumsum([0, *map(len, documents)])
    for number, document in enumerate(documents):
        i = 0
        while i < len(document):

            def draw(purpose: int, first: int = i) -> np.uint64:
                return hashing.words(seed, copy, number, firsts[number] + first, purpose)

            def integer(purpose: int, low: int, high: int) -> int:
                return low + int(hashing.below(draw(purpose), high - low + 1))

            target = max_tokens
            if hashing.uniform(draw(0)) < short:
                target = integer(1, 2, max_tokens)
            chunk: Document = []
            for sentence in document[i:]:
                chunk.append(sentence)
                if sum(map(len, chunk)) >= target:
                    break
            a_end = integer(2, 1, len(chunk) - 1) if len(chunk) >= 2 else 1
            a = sum(chunk[:a_end], [])
            is_random = len(chunk) == 1 or hashing.uniform(draw(3)) < 0.5
            if is_random:
                others = [other for other in range(len(documents)) if other != number]
                other = documents[others[integer(4, 0, len(others) - 1)]]
                b: list[int] = []
                for sentence in other[integer(5, 0, len(other) - 1) :]:
                    b += sentence
                    if len(b) >= target - len(a):
                        break
                i += a_end
            else:
                b = sum(chunk[a_end:], [])
                i += len(chunk)
            sizes = [len(a), len(b)]
            while sum(sizes) > max_tokens:
                sizes[0 if sizes[0] > sizes[1] else 1] -= 1
            remaining = []
            for segment, size, purpose in ((a, sizes[0], 6), (b, sizes[1], 7)):
                front = coins(draw(purpose), len(segment) - size)
                remaining.append(segment[front : front + size])
            examples.append((*remaining, is_random))
    return examples


def coins(word: np.uint64, count: int) -> int:
    """Counts the ones among `count` bits: 64 from each hash of `word`, high bits first."""
    heads = 0
    for number in range(-(-count // 64)):
        bits = format(int(hashing.words(number, word)), "064b")
        heads += bits[: min(64, count - 64 * number)].count("1")
    return heads


@pytest.mark.parametrize(
    "max_tokens, num_documents, longest",
    [(61, 12, 40), (20, 30, 5), (2, 4, 3), (5, 2, 9), (509, 3, 300)],
)
def test_pairs_are_those_of_the_original(max_tokens: int, num_documents: int, longest: int) -> None:
    documents = made_up(num_documents, longest, seed=max_tokens)
    documents[0][0] = list(range(-700, 0))  # far longer than an example
    flat = [token for document in documents for sentence in document for token in sentence]
    for copy in (0, 3):
        plan = packing.pack_pairs(*bounds(documents), max_tokens, 9, copy, 0.3)
        actual = [
            (flat[a : a + a_size], flat[b : b + b_size], bool(is_random))
            for a, a_size, b, b_size, is_random in zip(*plan)
        ]
        assert actual == plain_pairs(documents, max_tokens, 9, copy, 0.3)


def test_pairs_follow_the_documents() -> None:
    documents = made_up(40, 300, seed=1)
    sentence_starts, document_starts = bounds(documents)
    plan = packing.pack_pairs(sentence_starts, document_starts, 125, seed=0)
    token_documents = sentence_starts[document_starts]

    def document_of(tokens: np.ndarray) -> np.ndarray:
        return np.searchsorted(token_documents, tokens, side="right")

    assert plan.a_length.min() >= 1 and plan.b_length.min() >= 1
    assert (plan.a_length + plan.b_length).max() == 125
    for start, length in ((plan.a_start, plan.a_length), (plan.b_start, plan.b_length)):
        np.testing.assert_array_equal(document_of(start), document_of(start + length - 1))
    same = document_of(plan.a_start) == document_of(plan.b_start)
    np.testing.assert_array_equal(same, ~plan.is_random)
    assert 0.45 < plan.is_random.mean() < 0.55
    # Unless tokens were cut, a B that is not random begins where A ends, at a sentence's start.
    uncut = ~plan.is_random & (plan.a_length + plan.b_length < 125)
    np.testing.assert_array_equal(plan.b_start[uncut], plan.a_start[uncut] + plan.a_length[uncut])
    assert np.isin(plan.b_start[uncut], sentence_starts).all()
    # Sentences have up to 30 tokens; only short examples and a document's last example are not full.
    short = (plan.a_length + plan.b_length < 80).mean()
    assert 0.04 < short < 0.12
    # Every document is used from its first to its last sentence.
    assert set(document_of(plan.a_start)) == set(range(1, 41))


def test_random_documents_and_positions_are_uniform() -> None:
    documents = [[[0]] * 500 for _ in range(5)]
    plan = packing.pack_pairs(*bounds(documents), 4, seed=3)
    of_random = plan.b_start[plan.is_random]
    assert len(of_random) > 400
    mine = plan.a_start[plan.is_random] // 500
    for number in range(5):
        drawn = np.bincount(of_random[mine == number] // 500, minlength=5)
        assert drawn[number] == 0 and np.delete(drawn, number).min() > 10
    assert abs((of_random % 500).mean() - 250) < 25


def test_copies_and_seeds_differ() -> None:
    starts = bounds(made_up(10, 50, seed=1))
    first, again, copy, seed = (
        packing.pack_pairs(*starts, 60, *key) for key in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    for one, other in zip(first, again):
        np.testing.assert_array_equal(one, other)
    for other in (copy, seed):
        assert len(other.a_start) != len(first.a_start) or np.any(other.a_start != first.a_start)


def plain_spans(documents: list[Document], max_tokens: int) -> list[list[int | None]]:
    """Greedy packing of full sentences with explicit separators (None)."""
    stream: list[tuple[list[int], bool]] = []
    for document in documents:
        segments = [
            sentence[start : start + max_tokens]
            for sentence in document
            for start in range(0, len(sentence), max_tokens)
        ]
        stream += [(segment, segment is segments[-1]) for segment in segments]
    examples: list[list[int | None]] = []
    current: list[int | None] = []
    for segment, ends_document in stream:
        if current and len(current) + len(segment) > max_tokens:
            examples.append(current)
            current = []
        current = current + segment
        if ends_document:
            current.append(None)
    examples.append(current)
    return [example[:-1] if example[-1] is None else example for example in examples]


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 30, 126, 10_000])
@pytest.mark.parametrize("longest", [1, 12])
def test_full_sentences(max_tokens: int, longest: int) -> None:
    documents = made_up(40, longest, seed=max_tokens)
    plan = packing.pack_sentences(*bounds(documents), max_tokens)
    expected = plain_spans(documents, max_tokens)
    actual = [list(range(start, start + length)) for start, length in zip(*plan)]
    assert actual == [[token for token in example if token is not None] for example in expected]


@pytest.mark.parametrize("total", [1, 2, 5, 6, 40])
def test_the_longer_segment_is_cut(total: int) -> None:
    sizes = np.arange(1, 60)
    a, b = (grid.ravel() for grid in np.meshgrid(sizes, sizes))
    actual = packing._truncate(a, b, total)
    for one, other, one_kept, other_kept in zip(a, b, *actual):
        while one + other > total:
            if one > other:
                one -= 1
            else:
                other -= 1
        assert (one_kept, other_kept) == (one, other)


def test_ends_are_cut_evenly() -> None:
    trials = np.full(20_000, 100)
    heads = packing._binomial(hashing.words(0, np.arange(20_000)), trials)
    assert abs(heads.mean() - 50) < 0.15 and abs(heads.var() - 25) < 1.5
