"""Cross entropy of tokens with smoothed labels, as a sum and a weight."""

import jax
import jax.numpy as jnp
import numpy as np


def smoothed_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the weighted losses in nats, and the sum of the weights.

    The target is 1 - s at the label plus s / V at every one of the V words, the label's and that of
    padding among them, as in GNMT's and PyTorch's losses. fairseq spreads s over the other words
    only; that is this loss at s V / (V - 1). The mean divides by the number of tokens; MLPerf's
    GNMT divides by the number of sentences.

    Args:
      logits: (..., V).
      labels: int (...).
      weights: (...), 0 where a token does not count, such as padding.
      smoothing: s, in [0, 1).

    References:
      Szegedy et al., Rethinking the Inception Architecture, arXiv:1512.00567.
    """
    logits = logits.astype(np.promote_types(logits.dtype, jnp.float32))
    total = jax.nn.logsumexp(logits, -1)
    label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    losses = total - (1 - smoothing) * label
    if smoothing:
        losses -= smoothing * jnp.mean(logits, -1)
    # A padded token may give any loss, also a NaN: select, do not multiply.
    weights = weights.astype(losses.dtype)
    return jnp.sum(jnp.where(weights > 0, weights * losses, 0.0)), jnp.sum(weights)
