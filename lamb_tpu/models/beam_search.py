"""Beam search for the best sentences of a network that writes word by word."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]


class Search(NamedTuple):
    """Settings of a search; the defaults of the two penalties are MLPerf's.

    Attributes:
      max_length: most tokens of a sentence, its two signs included.
      begin, end: ids of the signs that begin and end a sentence; the id 0 is padding.
      beam: number of sentences that are pursued at once; 1 takes the likeliest word each time.
      length_penalty: alpha of the length's norm.
      length_constant: c of the length's norm.
      coverage_penalty: beta, the weight of the coverage.
      published: whether to score as MLPerf's published code does. There the coverage stays with the
        place in the beam when a sentence moves to another, and a search that has reached
        `max_length` is neither normalised nor penalised.
    """

    max_length: int
    begin: int
    end: int
    beam: int = 5
    length_penalty: float = 0.6
    length_constant: float = 5.0
    coverage_penalty: float = 0.1
    published: bool = False


class Found(NamedTuple):
    """The beams of each row at the end of a search.

    Attributes:
      tokens: int32 (rows, beam, max_length), from the first sign on. Sentences that end before the
        last one of their beam repeat the end sign; 0 follows.
      lengths: int32 (rows, beam), both signs counted.
      scores: (rows, beam), in the dtype of the logits.
      coverage: (rows, beam, source steps), the sum of the attention's weights, in their dtype.
      steps: int32 (), number of steps of the decoder.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array
    coverage: jax.Array
    steps: jax.Array


def search(step: Step, memory: Any, state: Any, settings: Search) -> Found:
    """Searches for each row's sentences with the highest scores.

    The score of a sentence of n tokens is log P / ((c + n) / (c + 1))^alpha + beta * sum over the
    source of log(min(coverage, 1)), where source positions without any weight do not count. It is
    applied at the end; the beam itself is chosen by log P. A row ends when all of its sentences
    have. The rows do not influence each other. It can be compiled: all shapes are fixed.

    Args:
      step: `(memory, state, tokens) -> (logits, weights, state)`, see `gnmt.Decode`.
      memory, state: trees whose leaves have the rows as their first axis.
      settings: see `Search`.

    References:
      Wu et al., Google's Neural Machine Translation System, arXiv:1609.08144, section 7.
    """
    beam, length = settings.beam, settings.max_length
    rows = len(jax.tree.leaves(memory)[0])
    memory, state = jax.tree.map(lambda x: jnp.repeat(x, beam, 0), (memory, state))
    tokens = jnp.zeros((rows, beam, length), jnp.int32).at[..., 0].set(settings.begin)
    logits, weights, _ = jax.eval_shape(step, memory, state, tokens[..., 0].ravel())
    # No sentence has more than `beam` of the best continuations.
    width = min(beam, logits.shape[-1])
    # Sentences that begin alike are one, so at first only the first of each beam counts.
    scores = jnp.full((rows, beam), -jnp.inf, logits.dtype).at[:, 0].set(0.0)
    found = Found(
        tokens,
        jnp.ones((rows, beam), jnp.int32),
        scores,
        jnp.zeros((rows, beam, weights.shape[-1]), weights.dtype),
        jnp.zeros((), jnp.int32),
    )

    def goes_on(carried: tuple[Found, Any, jax.Array]) -> jax.Array:
        found, _, done = carried
        return (found.steps < length - 1) & ~jnp.all(done)

    def advance(carried: tuple[Found, Any, jax.Array]) -> tuple[Found, Any, jax.Array]:
        found, state, done = carried
        last = lax.dynamic_index_in_dim(found.tokens, found.steps, 2, keepdims=False)
        ended = last == settings.end
        logits, weights, state = step(memory, state, last.ravel())
        likely, words = lax.top_k(jax.nn.log_softmax(logits), width)
        likely, words = (x.reshape(rows, beam, width) for x in (likely, words))
        # A sentence that has ended has one continuation, the end sign once more.
        only = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
        likely = jnp.where(ended[..., None], only, likely)
        words = jnp.where(ended[..., None], settings.end, words)
        added = jnp.where(ended[..., None], 0, weights.reshape(found.coverage.shape))
        coverage = found.coverage + added
        lengths = found.lengths + jnp.int32(~ended)
        scores, place = lax.top_k(
            (found.scores[..., None] + likely).reshape(rows, beam * width), beam
        )
        source = place // width
        word = jnp.take_along_axis(words.reshape(rows, beam * width), place, 1)
        new = Found(
            lax.dynamic_update_index_in_dim(_moved(found.tokens, source), word, found.steps + 1, 2),
            _moved(lengths, source),
            scores,
            coverage if settings.published else _moved(coverage, source),
            found.steps,
        )
        kept = Found(
            *(
                x if x.ndim == 0 else jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), before, x)
                for x, before in zip(new, found, strict=True)
            )
        )
        state = jax.tree.map(
            lambda x: _moved(x.reshape(rows, beam, *x.shape[1:]), source).reshape(x.shape), state
        )
        # A row whose sentences had all ended before this step has come to its end.
        return kept._replace(steps=found.steps + 1), state, done | jnp.all(ended, 1)

    found, _, done = lax.while_loop(goes_on, advance, (found, state, jnp.zeros(rows, bool)))
    constant = settings.length_constant
    lengths = found.lengths.astype(jnp.result_type(float))
    norm = ((constant + lengths) / (constant + 1)) ** settings.length_penalty
    covered = jnp.minimum(found.coverage, 1)
    penalty = jnp.sum(jnp.where(covered > 0, jnp.log(jnp.where(covered > 0, covered, 1)), 0), -1)
    scores = found.scores / norm.astype(found.scores.dtype) + settings.coverage_penalty * penalty
    if settings.published:
        scores = jnp.where(done[:, None], scores, found.scores)
    return found._replace(scores=scores)


def best(found: Found, end: int) -> jax.Array:
    """Returns the tokens of each row's best sentence, int32 (rows, max_length), 0 after its end."""
    chosen = jnp.argmax(found.scores, -1)
    tokens = jnp.take_along_axis(found.tokens, chosen[:, None, None], 1)[:, 0]
    is_end = tokens == end
    return jnp.where(jnp.cumsum(is_end, -1) > jnp.where(is_end, 1, 0), 0, tokens)


def _moved(x: jax.Array, source: jax.Array) -> jax.Array:
    """Returns (rows, beam, ...) with each sentence from the place in the beam it continues."""
    return jnp.take_along_axis(x, source.reshape(*source.shape, *[1] * (x.ndim - 2)), 1)
