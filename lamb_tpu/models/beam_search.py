"""Beam search for networks that generate sentences word by word."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]


class Search(NamedTuple):
    """Settings of a beam search; the penalties have MLPerf's values by default.

    Attributes:
      max_length: maximum number of tokens in a sentence, including the start and end tokens.
      begin, end: ids of the start and end tokens; the id 0 is padding.
      beam: number of hypotheses per sentence; 1 is greedy search.
      length_penalty, length_constant, coverage_penalty: alpha, c and beta in the score, see `search`.
      published: whether to repeat two deviations of MLPerf's code from the formula: if a hypothesis
        moves to another position in the beam, its coverage stays at the old position; and in a row
        that reaches `max_length`, the scores are log P, without normalisation and penalty.
    """

    max_length: int
    begin: int
    end: int
    beam: int = 5
    length_penalty: float = 0.6
    length_constant: float = 5.0
    coverage_penalty: float = 0.1
    published: bool = False


class Hypotheses(NamedTuple):
    """The hypotheses of each row at the end of a search.

    Attributes:
      tokens: int32 (rows, beam, max_length), including the start token. A hypothesis that ends
        before the others of its row repeats the end token; padding follows the row's last step.
      lengths: int32 (rows, beam), including the start and end tokens.
      scores: (rows, beam), in the dtype of the logits.
      coverage: (rows, beam, source steps), the sum over decoder steps of the attention weights, in
        the dtype of the weights.
      steps: int32 scalar, number of decoder steps.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array
    coverage: jax.Array
    steps: jax.Array


def search(step: Step, memory: Any, state: Any, settings: Search) -> Hypotheses:
    """Searches for the hypotheses with the highest scores in each row.

    The score of a hypothesis with n tokens, including the start and end tokens, is
    log P / ((c + n) / (c + 1))^alpha + beta * sum of log(min(coverage, 1)) over the source positions
    with nonzero coverage. The search itself compares log P; scores are computed at its end. A row
    ends when all of its hypotheses have ended.

    `step` is a function `(memory, state, tokens) -> (logits, weights, state)`; `gnmt.Decode`
    describes its arguments and results. `memory` and `state` have rows as their first axis.

    References:
      Wu et al., Google's Neural Machine Translation System, arXiv:1609.08144, section 7.
    """
    beam, length = settings.beam, settings.max_length
    rows = len(jax.tree.leaves(memory)[0])
    memory, state = jax.tree.map(lambda x: jnp.repeat(x, beam, 0), (memory, state))
    tokens = jnp.zeros((rows, beam, length), jnp.int32).at[..., 0].set(settings.begin)
    logits, weights, _ = jax.eval_shape(step, memory, state, tokens[..., 0].ravel())
    # At most `beam` continuations of one hypothesis can be among the best.
    width = min(beam, logits.shape[-1])
    # All hypotheses of a row are equal at first, so only the first hypothesis gets a finite score.
    scores = jnp.full((rows, beam), -jnp.inf, logits.dtype).at[:, 0].set(0.0)
    hypotheses = Hypotheses(
        tokens=tokens,
        lengths=jnp.ones((rows, beam), jnp.int32),
        scores=scores,
        coverage=jnp.zeros((rows, beam, weights.shape[-1]), weights.dtype),
        steps=jnp.zeros((), jnp.int32),
    )

    def continues(carried: tuple[Hypotheses, Any, jax.Array]) -> jax.Array:
        old, _, done = carried
        return (old.steps < length - 1) & ~jnp.all(done)

    def advance(carried: tuple[Hypotheses, Any, jax.Array]) -> tuple[Hypotheses, Any, jax.Array]:
        old, state, done = carried
        last = lax.dynamic_index_in_dim(old.tokens, old.steps, 2, keepdims=False)
        ended = last == settings.end
        logits, weights, state = step(memory, state, last.ravel())
        likely, words = lax.top_k(jax.nn.log_softmax(logits), width)
        likely, words = (x.reshape(rows, beam, width) for x in (likely, words))
        # A hypothesis that has ended has one continuation, another end token.
        only = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
        likely = jnp.where(ended[..., None], only, likely)
        words = jnp.where(ended[..., None], settings.end, words)
        added = jnp.where(ended[..., None], 0, weights.reshape(old.coverage.shape))
        coverage = old.coverage + added
        lengths = old.lengths + jnp.int32(~ended)
        scores, chosen = lax.top_k(
            (old.scores[..., None] + likely).reshape(rows, beam * width), beam
        )
        source = chosen // width
        word = jnp.take_along_axis(words.reshape(rows, beam * width), chosen, 1)
        new = Hypotheses(
            tokens=lax.dynamic_update_index_in_dim(
                _moved(old.tokens, source), word, old.steps + 1, 2
            ),
            lengths=_moved(lengths, source),
            scores=scores,
            coverage=coverage if settings.published else _moved(coverage, source),
            steps=old.steps,
        )
        new = Hypotheses(*(_frozen(done, before, x) for before, x in zip(old, new, strict=True)))
        state = jax.tree.map(
            lambda x: _moved(x.reshape(rows, beam, *x.shape[1:]), source).reshape(x.shape), state
        )
        # A row is done if all of its hypotheses had ended before this step.
        return new._replace(steps=old.steps + 1), state, done | jnp.all(ended, 1)

    start = hypotheses, state, jnp.zeros(rows, bool)
    hypotheses, _, done = lax.while_loop(continues, advance, start)
    return hypotheses._replace(scores=_scores(hypotheses, done, settings))


def _scores(hypotheses: Hypotheses, done: jax.Array, settings: Search) -> jax.Array:
    """Computes the scores of hypotheses from their log P, see `search`."""
    constant, log_p = settings.length_constant, hypotheses.scores
    lengths = hypotheses.lengths.astype(jnp.result_type(float))
    norm = ((constant + lengths) / (constant + 1)) ** settings.length_penalty
    covered = jnp.minimum(hypotheses.coverage, 1)
    penalty = jnp.sum(jnp.where(covered > 0, jnp.log(jnp.where(covered > 0, covered, 1)), 0), -1)
    scores = log_p / norm.astype(log_p.dtype) + settings.coverage_penalty * penalty
    return jnp.where(done[:, None], scores, log_p) if settings.published else scores


def best(hypotheses: Hypotheses, end: int) -> jax.Array:
    """Returns each row's best sentence, int32 (rows, max_length), with padding after its end."""
    chosen = jnp.argmax(hypotheses.scores, -1)
    tokens = jnp.take_along_axis(hypotheses.tokens, chosen[:, None, None], 1)[:, 0]
    is_end = tokens == end
    return jnp.where(jnp.cumsum(is_end, -1) > jnp.where(is_end, 1, 0), 0, tokens)


def _frozen(done: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
    """Returns `before` for rows that are done, and `after` for all other rows."""
    if after.ndim == 0:
        return after
    return jnp.where(done.reshape(-1, *[1] * (after.ndim - 1)), before, after)


def _moved(x: jax.Array, source: jax.Array) -> jax.Array:
    """Returns the values of the hypotheses, (rows, beam, ...), at the beam positions `source`."""
    return jnp.take_along_axis(x, source.reshape(*source.shape, *[1] * (x.ndim - 2)), 1)
