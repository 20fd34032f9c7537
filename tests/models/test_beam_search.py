"""Beam search, compared with an enumeration of all sentences of a small language."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.models.beam_search import Hypotheses, Search, best, search

WORDS, STATES, SOURCE, LENGTH = 5, 7, 3, 5
BEGIN, END = 2, 3
ROWS = 4
RNG = np.random.default_rng(3)
# Next-word logits and attention weights of each row and state; the state depends on all previous words.
LOGITS = jnp.asarray(RNG.normal(0, 2, (ROWS, STATES, WORDS)), jnp.float32)
WEIGHTS = jnp.asarray(RNG.dirichlet([0.5] * SOURCE, (ROWS, STATES)), jnp.float32)


def step(memory: Any, state: jax.Array, tokens: jax.Array) -> tuple[Any, Any, Any]:
    logits, weights = memory
    state = (3 * state + tokens) % STATES
    rows = jnp.arange(len(state))
    return logits[rows, state], weights[rows, state], state


def actual(rows: list[int] | None = None, **settings: Any) -> Hypotheses:
    chosen = jnp.array(range(ROWS) if rows is None else rows)
    return jax.jit(
        lambda logits, weights: search(
            step,
            (logits, weights),
            jnp.zeros(len(chosen), jnp.int32),
            Search(LENGTH, BEGIN, END, **settings),
        )
    )(LOGITS[chosen], WEIGHTS[chosen])


def sentences(row: int, alpha: float, beta: float) -> dict[tuple[int, ...], float]:
    """Returns every sentence that ends with END or has the maximum length, with its score."""
    scores = {}
    for words in itertools.product(range(WORDS), repeat=LENGTH - 1):
        size = words.index(END) + 1 if END in words else len(words)
        state, total, covered = 0, 0.0, np.zeros(SOURCE)
        for before, word in zip((BEGIN, *words), words[:size]):
            state = (3 * state + before) % STATES
            logits = np.asarray(LOGITS[row, state], np.float64)
            total += logits[word] - np.log(np.exp(logits).sum())
            covered += np.asarray(WEIGHTS[row, state], np.float64)
        norm = ((5 + size + 1) / 6) ** alpha
        penalty = sum(math.log(min(x, 1)) for x in covered)
        scores[BEGIN, *words[:size]] = total / norm + beta * penalty
    return scores


@pytest.mark.long
@pytest.mark.parametrize("alpha, beta", [(0.0, 0.0), (0.6, 0.1), (1.0, 0.5)])
def test_a_beam_as_wide_as_the_language_finds_the_best(alpha: float, beta: float) -> None:
    result = actual(beam=WORDS ** (LENGTH - 1), length_penalty=alpha, coverage_penalty=beta)
    texts = best(result, END)
    for row in range(ROWS):
        scores = sentences(row, alpha, beta)
        expected = max(scores, key=scores.__getitem__)
        assert tuple(int(x) for x in texts[row][: len(expected)]) == expected
        assert not np.any(texts[row][len(expected) :])
        assert float(result.scores[row].max()) == pytest.approx(scores[expected], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("beam", [1, 2, 3, 8])
def test_every_hypothesis_has_the_right_score(beam: int) -> None:
    result = actual(beam=beam, length_penalty=0.6, coverage_penalty=0.3)
    for row in range(ROWS):
        scores, seen = sentences(row, 0.6, 0.3), set()
        for tokens, length, score in zip(
            result.tokens[row].tolist(), result.lengths[row], result.scores[row]
        ):
            text = tuple(tokens[:length])
            assert scores[text] == pytest.approx(float(score), abs=1e-5)
            seen.add(text)
        assert len(seen) == beam


def test_one_beam_takes_the_likeliest_word() -> None:
    texts = best(actual(beam=1), END)
    for row in range(ROWS):
        state, text = 0, [BEGIN]
        while len(text) < LENGTH and text[-1] != END:
            state = (3 * state + text[-1]) % STATES
            text.append(int(jnp.argmax(LOGITS[row, state])))
        assert texts[row].tolist() == text + [0] * (LENGTH - len(text))


@pytest.mark.long
def test_rows_do_not_influence_each_other() -> None:
    full = actual(beam=3)
    for rows in ([2], [3, 0]):
        part, index = actual(rows, beam=3), jnp.array(rows)
        for name in ("lengths", "scores", "coverage"):
            np.testing.assert_array_equal(getattr(part, name), getattr(full, name)[index])
        np.testing.assert_array_equal(best(part, END), best(full, END)[index])


@pytest.mark.long
def test_published_scores_differ_where_sentences_move() -> None:
    ours, theirs = actual(beam=3), actual(beam=3, published=True)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert np.abs(ours.coverage - theirs.coverage).max() > 0.1
