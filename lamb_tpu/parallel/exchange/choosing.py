"""L-GreCo's choice: a compression for each layer, the least to send within a budget of errors.

Reference: Alimohammadi, Markov, Frantar and Alistarh, "L-GreCo: Layerwise-Adaptive Gradient
Compression for Efficient and Accurate Deep Learning", https://arxiv.org/abs/2210.17357, and their
code, which this repeats exactly: it adds up norms of errors, whereas the paper bounds the sum of
their squares. Options may be ranks, bits or fractions of values.
"""

from typing import NamedTuple

import numpy as np

BUCKETS = 10_000


class Tables(NamedTuple):
    """The dynamic programme over the first layers.

    Attributes:
      sizes: (layers, budgets), the least size of layers 0 to i within a budget; inf if none is.
      options: (layers, budgets), layer i's option in it; -1 if none is.
    """

    sizes: np.ndarray
    options: np.ndarray


def choose(
    errors: np.ndarray, sizes: np.ndarray, reference: int, factor: float = 1.0
) -> list[int] | None:
    """Returns each layer's option, of least total size; None if no choice is within the budget.

    Args:
      errors: (layers, options), norm of what each option leaves out of a layer.
      sizes: (layers, options), what each option sends.
      reference: the option that would be taken for all layers.
      factor: the budget, relative to the sum of the reference's errors.
    """
    target = budget(errors, reference, factor)
    if not (np.isfinite(target) and target > 0):
        return None
    buckets = in_buckets(errors, target)
    found = tables(buckets, sizes)
    used = int(np.argmin(found.sizes[-1]))  # the first, hence with the least error
    if not np.isfinite(found.sizes[-1, used]):
        return None
    choice = []
    for layer in reversed(range(len(errors))):
        choice.append(int(found.options[layer, used]))
        used -= buckets[layer, choice[-1]]
    return choice[::-1]


def budget(errors: np.ndarray, reference: int, factor: float) -> float:
    """Returns the largest sum of errors: `factor` times that of the reference."""
    return float(factor * np.sum(errors[:, reference]))


def in_buckets(errors: np.ndarray, target: float) -> np.ndarray:
    """Returns errors in units of a 10,000th of the target, rounded up, from 1 to 10,000."""
    limited = np.minimum(np.where(np.isnan(errors), np.inf, errors), target + 1)
    return np.clip(np.ceil(limited / (target / BUCKETS)), 1, BUCKETS).astype(int)


def tables(buckets: np.ndarray, sizes: np.ndarray) -> Tables:
    """Returns the least sizes within each budget of 0 to 10,000 buckets.

    Of options of one size the first is taken. The first layer's error must be below the budget, as
    in the authors' code, so that 9,999 buckets can be used in total.

    Args:
      buckets: (layers, options), errors as `in_buckets` returns them.
      sizes: (layers, options).
    """
    found = Tables(
        np.full((len(buckets), BUCKETS + 1), np.inf), np.full((len(buckets), BUCKETS + 1), -1)
    )
    before = np.where(np.arange(BUCKETS + 1) > 0, 0.0, np.inf)
    for layer, (layer_buckets, layer_sizes) in enumerate(zip(buckets, sizes, strict=True)):
        for option, (used, size) in enumerate(zip(layer_buckets, layer_sizes, strict=True)):
            total = before[: BUCKETS + 1 - used] + size
            better = total < found.sizes[layer, used:]
            found.sizes[layer, used:][better] = total[better]
            found.options[layer, used:][better] = option
        before = found.sizes[layer]
    return found
