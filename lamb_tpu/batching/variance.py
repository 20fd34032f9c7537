r"""The variance of per-example gradients, for the norm test and the inner-product tests.

With gradients :math:`g_i` and their mean :math:`g`, over the full gradient vector:

- `variance`: :math:`\mathrm{tr}(\Sigma)`, the sum of the elements' sample variances;
- `inner_product_variance`: the sample variance of :math:`\langle g_i, g \rangle`;
- `orthogonal_variance`: the trace of the covariance of the components that are orthogonal to
  :math:`g`, :math:`g_i - \langle g_i, g \rangle g / |g|^2`;
- `grad_sq`: :math:`|g|^2`.

The rows (gradients) are divided into parts: microbatches, devices or processes. First compute the
mean of all rows. Then call `sums` for each part, and add the results. At the end call `statistics`
once.

References:
  Byrd et al., Sample size selection in optimization methods for machine learning, 2012.
  Bollapragada, Byrd, Nocedal, Adaptive Sampling Strategies for Stochastic Optimization,
  arXiv:1710.11258.
  Lau, Liu, Kolar, AdAdaGrad, arXiv:2402.11215; the authors' code, timlautk/AdAdaGrad, was read.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lamb_tpu.optim import trust_ratio
from lamb_tpu.optim.checks import check_choices, check_whole
from lamb_tpu.types import PyTree

VARIANCE, GRAD_SQ = "variance", "grad_sq"
INNER_PRODUCT, ORTHOGONAL = "inner_product_variance", "orthogonal_variance"
LAWS = ("pooled", "parts")


class VarianceSums(NamedTuple):
    """Sums over the rows of a part; add the sums of all parts, or use `jax.lax.psum`.

    g_i is a row, m the mean of the part, g the mean of all rows, and d the direction. All arrays
    are float32; vectors have one element, or with `per_tensor` one element for each leaf.
    """

    rows: jax.Array  # (): the number of rows
    parts: jax.Array  # (): the number of parts
    within: jax.Array  # vector: the sum of |g_i - m|^2
    between: jax.Array  # vector: rows * |m - g|^2
    inner_within: jax.Array  # vector: the sum of <g_i - m, d>^2
    inner_between: jax.Array  # vector: rows * <m - g, d>^2
    mean_sq: jax.Array  # vector: rows * |d|^2


def sums(grads: PyTree, mean: Any, per_tensor: bool = False, direction: Any = None) -> VarianceSums:
    """Returns the sums of one part.

    Args:
      grads: a pytree of gradients; the first axis of each leaf has the rows. A row is the gradient
        of an example, or the mean gradient of a microbatch, see `statistics`.
      mean: the mean of all rows of all parts; a tree like `grads`, but without the first axis.
      per_tensor: whether to take inner products within each leaf, as published, instead of over the
        entire vector.
      direction: a tree like `mean`. Inner products are taken with this tree, whose squared norm is
        `grad_sq`. None for `mean`. If the rows are a sample of a batch, use the gradient of the batch.
    """
    columns = []
    direction = mean if direction is None else direction
    leaves = list(zip(*map(jax.tree.leaves, (grads, mean, direction)), strict=True))
    if not leaves:
        raise ValueError("grads must have at least one leaf")
    for leaf, center, along in leaves:
        dtype = trust_ratio.compute_dtype(leaf)
        # Inner products of long vectors are sums of many terms, so compute them in at least
        # float32.
        rows = jnp.reshape(leaf, (leaf.shape[0], -1)).astype(dtype)
        center, along = (jnp.ravel(vector).astype(dtype) for vector in (center, along))
        local = jnp.mean(rows, axis=0)
        apart, away = rows - local, local - center
        columns.append(
            (
                jnp.sum(jnp.square(apart)),
                jnp.sum(jnp.square(away)),
                jnp.sum(apart * along, axis=1),
                jnp.sum(away * along),
                jnp.sum(jnp.square(along)),
            )
        )
    totals = [jnp.stack(column) for column in zip(*columns, strict=True)]
    if not per_tensor:  # add the inner products of all leaves before they are squared below
        totals = [jnp.sum(value, axis=0, keepdims=True) for value in totals]
    within, between, inner, inner_mean, mean_sq = totals
    count = jnp.asarray(leaves[0][0].shape[0], within.dtype)
    return VarianceSums(
        rows=count,
        parts=jnp.ones_like(count),
        within=within,
        between=count * between,
        inner_within=jnp.sum(jnp.square(inner), axis=1),
        inner_between=count * jnp.square(inner_mean),
        mean_sq=count * mean_sq,
    )


def statistics(
    total: VarianceSums, law: str = "pooled", examples_per_row: int = 1
) -> dict[str, jax.Array]:
    """Returns the statistics of the tests, from the sums over all parts.

    Rows may also be mean gradients of microbatches, which are cheap to compute. The variance of
    these means, times the number of examples per microbatch, is an unbiased estimate of the
    per-example variance, but a noisier one. For the norm test, `trace` of `noise_scale.estimate` is
    the same number, and only needs norms.

    >>> grads = {'w': jnp.array([[1., 1.], [3., 1.], [2., 4.]])}
    >>> mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), grads)
    >>> {name: round(float(value), 4) for name, value in statistics(sums(grads, mean)).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'variance': 4.0, 'inner_product_variance': 16.0, 'orthogonal_variance': 2.0, 'grad_sq': 8.0}

    Args:
      total: the results of `sums`, added over all parts.
      law: 'pooled' is the sample variance of all rows. 'parts' is the published form for several
        workers with equal numbers of rows: the mean of the workers' sample variances, plus the
        population variance of the workers' means. This form ignores that the means are noisy too.
        For a single part, both forms are equal.
      examples_per_row: the number of examples per row, if rows are mean gradients of microbatches.

    Returns:
      Scalars `variance`, `inner_product_variance`, `orthogonal_variance` and `grad_sq`. If there
      are too few rows for a variance, the variances are NaN.

    Raises:
      ValueError: the law is unknown, or examples_per_row is below 1.
    """
    check_choices(law=(law, LAWS))
    check_whole("examples_per_row", examples_per_row, lowest=1)

    def combined(within: jax.Array, between: jax.Array) -> jax.Array:
        if law == "pooled":
            value = (within + between) / (total.rows - 1)
        else:
            value = within / (total.rows - total.parts) + between / total.rows
        return examples_per_row * value

    variance = combined(total.within, total.between)
    inner = combined(total.inner_within, total.inner_between)
    mean_sq = total.mean_sq / total.rows
    # If the direction is 0, no component of a gradient lies along it.
    along = jnp.where(mean_sq > 0, inner / jnp.where(mean_sq > 0, mean_sq, 1.0), 0.0)
    return {
        VARIANCE: jnp.sum(variance),
        INNER_PRODUCT: jnp.sum(inner),
        ORTHOGONAL: jnp.sum(variance - along),
        GRAD_SQ: jnp.sum(mean_sq),
    }
