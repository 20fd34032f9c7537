"""L-GreCo's choice of a compression option for each layer: the least size within an error budget.

An option may be a rank, a number of bits or a fraction of values.

Reference: Alimohammadi, Markov, Frantar and Alistarh, "L-GreCo: Layerwise-Adaptive Gradient
Compression for Efficient and Accurate Deep Learning", https://arxiv.org/abs/2210.17357, and their
code, which this module reproduces exactly. The code bounds the sum of the norms of the errors,
whereas the paper bounds the sum of the squared norms.
"""

from typing import NamedTuple

import numpy as np

BUCKETS = 10_000


class Tables(NamedTuple):
    """The tables of the dynamic program over layers; row i, column j is for layer i and budget j."""

    sizes: (
        np.ndarray
    )  # the least total size of layers 0 to i; inf if no choice is within the budget
    options: np.ndarray  # the option of layer i in the choice with the least size; -1 if none fits


def choose(
    errors: np.ndarray, sizes: np.ndarray, reference: int, factor: float = 1.0
) -> list[int] | None:
    """Returns the index of an option for each layer; None if no choice is within the budget.

    The choice has the least total size.

    Args:
      errors: (layers, options), norm of the error that each option makes in each layer.
      sizes: (layers, options), number of values that each option sends for each layer.
      reference: index of the option whose errors, summed over all layers, define the budget.
      factor: the budget, relative to this sum of errors.
    """
    target = budget(errors, reference, factor)
    if not (np.isfinite(target) and target > 0):
        return None
    buckets = in_buckets(errors, target)
    result = tables(buckets, sizes)
    used = int(np.argmin(result.sizes[-1]))  # the first minimum, which has the least error
    if not np.isfinite(result.sizes[-1, used]):
        return None
    choice = []
    for layer in reversed(range(len(errors))):
        choice.append(int(result.options[layer, used]))
        used -= buckets[layer, choice[-1]]
    return choice[::-1]


def budget(errors: np.ndarray, reference: int, factor: float) -> float:
    """Returns the largest allowed sum of errors: `factor` times the sum of the reference's errors."""
    return float(factor * np.sum(errors[:, reference]))


def in_buckets(errors: np.ndarray, target: float) -> np.ndarray:
    """Returns each error in 10,000ths of the target, rounded up and clipped to the range 1 to 10,000."""
    limited = np.minimum(np.where(np.isnan(errors), np.inf, errors), target + 1)
    return np.clip(np.ceil(limited / (target / BUCKETS)), 1, BUCKETS).astype(int)


def tables(buckets: np.ndarray, sizes: np.ndarray) -> Tables:
    """Returns the least total sizes, and the choices that have them, for budgets of 0 to 10,000 buckets.

    Of several options with the same size, the first is chosen. As in the authors' code, the first
    layer's error must be below the budget, so choices can use at most 9,999 buckets in total.
    `buckets` and `sizes` are (layers, options).
    """
    shape = len(buckets), BUCKETS + 1
    result = Tables(np.full(shape, np.inf), np.full(shape, -1))
    before = np.where(np.arange(BUCKETS + 1) > 0, 0.0, np.inf)
    for layer, (layer_buckets, layer_sizes) in enumerate(zip(buckets, sizes, strict=True)):
        for option, (used, size) in enumerate(zip(layer_buckets, layer_sizes, strict=True)):
            total = before[: BUCKETS + 1 - used] + size
            better = total < result.sizes[layer, used:]
            result.sizes[layer, used:][better] = total[better]
            result.options[layer, used:][better] = option
        before = result.sizes[layer]
    return result
