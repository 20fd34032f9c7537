r"""The variance of per-example gradients, for the norm test and the inner-product tests.

With gradients :math:`g_i` and their mean :math:`g`, over the whole gradient vector:

- `variance`: :math:`\mathrm{tr}(\Sigma)`, the sum of the elements' sample variances;
- `inner_product_variance`: the sample variance of :math:`\langle g_i, g \rangle`;
- `orthogonal_variance`: :math:`\mathrm{tr}` of the covariance of the parts across :math:`g`,
  :math:`g_i - \langle g_i, g \rangle g / |g|^2`;
- `grad_sq`: :math:`|g|^2`.

They come from sums that add up over parts of the rows: microbatches, devices, processes. First the
mean of all rows is needed, whose sums add up as any gradient's do; then `sums` of each part; then
`statistics`, once.

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
from lamb_tpu.optim.checks import check_choice, check_whole

VARIANCE, GRAD_SQ = "variance", "grad_sq"
INNER_PRODUCT, ORTHOGONAL = "inner_product_variance", "orthogonal_variance"
LAWS = ("pooled", "parts")


class VarianceSums(NamedTuple):
    """Sums over the rows of one part, or of several: add them, or `jax.lax.psum` them.

    All are float32; a vector has one element, or with `per_tensor` one for each leaf. Deviations
    are from the part's own mean (`within`), and of that from the mean of all rows (`between`).
    """

    rows: jax.Array  # (): how many gradients
    parts: jax.Array  # (): how many parts
    within: jax.Array  # the sum of |g_i - m|^2, m the part's mean
    between: jax.Array  # rows * |m - g|^2
    inner_within: jax.Array  # the sum of <g_i - m, d>^2, d the direction: the mean of all rows
    inner_between: jax.Array  # rows * <m - g, d>^2
    mean_sq: jax.Array  # rows * |d|^2


def sums(grads: Any, mean: Any, per_tensor: bool = False, direction: Any = None) -> VarianceSums:
    """Returns the sums of one part.

    Args:
      grads: a pytree of gradients, one for each row along every leaf's first axis: of single
        examples, or the means of microbatches, see `statistics`.
      mean: the mean gradient of all rows of all parts; leaves as in `grads` without that axis.
      per_tensor: take inner products within each leaf, as published, and not over the whole vector.
      direction: a vector as `mean`, with which inner products are taken and whose square is
        `grad_sq`; None for `mean`. Where rows are a sample of a batch it is the batch's gradient.
    """
    columns = []
    direction = mean if direction is None else direction
    leaves = list(zip(*map(jax.tree.leaves, (grads, mean, direction)), strict=True))
    if not leaves:
        raise ValueError("grads must have at least one leaf")
    for leaf, center, along in leaves:
        dtype = trust_ratio.compute_dtype(leaf)
        # Products with a long vector are sums of many terms: float32 must not become bfloat16.
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
    within, between, inner, inner_mean, mean_sq = (
        jnp.stack(column) for column in zip(*columns, strict=True)
    )
    if not per_tensor:  # inner products are of the whole vector, and squared afterwards
        within, between, inner, inner_mean, mean_sq = (
            jnp.sum(value, axis=0, keepdims=True)
            for value in (within, between, inner, inner_mean, mean_sq)
        )
    count = jnp.asarray(leaves[0][0].shape[0], within.dtype)
    return VarianceSums(
        count,
        jnp.ones_like(count),
        within,
        count * between,
        jnp.sum(jnp.square(inner), axis=1),
        count * jnp.square(inner_mean),
        count * mean_sq,
    )


def statistics(
    total: VarianceSums, law: str = "pooled", examples_per_row: int = 1
) -> dict[str, jax.Array]:
    """Returns the statistics that the tests need, from the sums over all parts.

    The cheap form has microbatches for rows: the variance of their means times the examples in each
    is an unbiased estimate of that of single examples, from fewer rows and so with more noise. For
    the norm test alone `noise_scale.estimate` gives that number as `trace`, from norms only.

    >>> grads = {'w': jnp.array([[1., 1.], [3., 1.], [2., 4.]])}
    >>> mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), grads)
    >>> {name: round(float(value), 4) for name, value in statistics(sums(grads, mean)).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'variance': 4.0, 'inner_product_variance': 16.0, 'orthogonal_variance': 2.0, 'grad_sq': 8.0}

    Args:
      total: of `sums`, added up over all parts.
      law: 'pooled' is the sample variance of all rows. 'parts' is the published form for several
        workers: the mean of the workers' sample variances plus the population variance of their
        means, for workers with as many rows each; it counts what varies between them as if the
        noise of their means were not in it. For one part both are the same.
      examples_per_row: of microbatches as rows.

    Returns:
      Scalars `variance`, `inner_product_variance`, `orthogonal_variance` and `grad_sq`. NaN where
      there are too few rows for a variance.

    Raises:
      ValueError: an unknown law, or examples_per_row below 1.
    """
    check_choice("law", law, LAWS)
    check_whole("examples_per_row", examples_per_row, lowest=1)

    def varied(within: jax.Array, between: jax.Array) -> jax.Array:
        if law == "pooled":
            value = (within + between) / (total.rows - 1)
        else:
            value = within / (total.rows - total.parts) + between / total.rows
        return examples_per_row * value

    variance = varied(total.within, total.between)
    inner = varied(total.inner_within, total.inner_between)
    mean_sq = total.mean_sq / total.rows
    # Of a mean that is 0 nothing lies along it.
    along = jnp.where(mean_sq > 0, inner / jnp.where(mean_sq > 0, mean_sq, 1.0), 0.0)
    return {
        VARIANCE: jnp.sum(variance),
        INNER_PRODUCT: jnp.sum(inner),
        ORTHOGONAL: jnp.sum(variance - along),
        GRAD_SQ: jnp.sum(mean_sq),
    }
