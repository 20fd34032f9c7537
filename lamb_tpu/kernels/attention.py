"""The core of attention: softmax of scores, dropout, the weighted sum of values, and the gradient.

At 512 tokens BERT-Large has 67 million scores per layer for 16 examples, and each pass over them
takes more time than the matrix products. Therefore `attend` stores only one array of that size for
the backward pass, in the activations' dtype. Without `attend`, the compiler stores up to four such arrays.
"""

import functools

import jax
import jax.numpy as jnp

# Added to the scores of padding. It is finite, so that an example with only padding gives no NaN.
# The factor 0.7 prevents an overflow to -inf when a score is added.
_PADDING = -0.7 * float(jnp.finfo(jnp.float32).max)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    keep: jax.Array | None,
    rate: float,
) -> jax.Array:
    """Sums values weighted by softmax(query key^T / sqrt(width)), with dropout of the weights.

    Scores, their maximum, exponentials and sums are float32.

    Args:
      query, key, value: (batch, length, heads, width).
      mask: bool (batch, length), true at tokens; other positions get no attention. An example
        without tokens attends to all positions equally.
      keep: bool (batch, heads, queries, keys), true for probabilities that are not dropped; these
        are divided by 1 - rate. None for no dropout.
      rate: fraction of dropped probabilities; 0 if `keep` is None.

    Returns:
      (batch, length, heads, width), in the dtype of `value`.
    """
    return _forward(query, key, value, mask, keep, rate)[0]


def _scaled(query: jax.Array) -> jax.Array:
    # Scale the query, which is smaller than the scores, in float32: in bfloat16 the factor would
    # be rounded too.
    return (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    keep: jax.Array | None,
    rate: float,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores = (
        jnp.einsum("bqnh,bknh->bnqk", _scaled(query), key, preferred_element_type=jnp.float32)
        + jnp.where(mask, 0, _PADDING)[:, None, None, :]
    )
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1)
    # One array stores the weights and the mask: dropped weights are negative. A weight that
    # underflows to 0 loses its sign, but its gradient is 0 anyway.
    signed = weights if keep is None else jnp.where(keep, weights, -weights)
    signed = signed.astype(value.dtype)
    mixed = jnp.einsum(
        "bnqk,bknh->bqnh", jnp.maximum(signed, 0), value, preferred_element_type=jnp.float32
    )
    # Divide the output, which is smaller than the weights.
    mixed = (mixed * _of_queries(1 / ((1 - rate) * total))).astype(value.dtype)
    # Only `signed` has the size of the scores, (batch, heads, length, length).
    return mixed, (query, key, value, signed, total, mixed)


def _of_queries(x: jax.Array) -> jax.Array:
    """Reshapes (batch, heads, length) to (batch, length, heads, 1)."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def _backward(
    rate: float, saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array | None, ...]:
    query, key, value, signed, total, mixed = saved
    # For p = softmax(s), ds = p (dp - sum(p dp)); this sum equals the sum of grad times the output.
    inner = jnp.einsum("bqnh,bqnh->bnq", grad, mixed, preferred_element_type=jnp.float32) / total
    grad = grad.astype(inner.dtype) * _of_queries(1 / ((1 - rate) * total))
    grad = grad.astype(value.dtype)
    of_weights = jnp.einsum("bqnh,bknh->bnqk", grad, value, preferred_element_type=jnp.float32)
    # p is |signed| / total; `grad` and `inner` are already divided by `total`.
    of_scores = jnp.where(signed > 0, of_weights, 0) - inner[..., None]
    of_scores = jnp.abs(signed).astype(of_scores.dtype) * of_scores
    of_scores = of_scores.astype(value.dtype)
    of_value = jnp.einsum("bnqk,bqnh->bknh", jnp.maximum(signed, 0), grad)
    # The gradient of a scaling is the same scaling.
    of_query = _scaled(jnp.einsum("bnqk,bknh->bqnh", of_scores, key))
    of_key = jnp.einsum("bnqk,bqnh->bknh", of_scores, _scaled(query))
    # `mask` and `keep` are boolean and have no gradient.
    return of_query, of_key, of_value, None, None


attend.defvjp(_forward, _backward)
