"""Cross entropy of tokens with smoothed labels, as a sum and a weight."""

import jax
import jax.numpy as jnp
import numpy as np


def smoothed_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the weighted losses in nats, and the sum of the weights.

    The target is 1 - s at the label, plus s / V at each of the V words of the vocabulary, including
    the label and the padding token, as in GNMT's and PyTorch's losses. fairseq spreads s over the
    words other than the label; this equals our loss with the smoothing s V / (V - 1). The ratio of the
    two sums is a mean over tokens; MLPerf's GNMT divides by the number of sentences.

    Args:
      logits: (..., V).
      labels: int (...).
      weights: (...), 0 if a token does not count, such as padding.
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
    # Use `where`, not multiplication: a padded token may give NaN.
    weights = weights.astype(losses.dtype)
    return jnp.sum(jnp.where(weights > 0, weights * losses, 0.0)), jnp.sum(weights)
