"""The critical batch: the largest batch that reaches about the same loss with the same examples.

It is measured with branches: from one checkpoint a run continues at several batch sizes, with the
same examples in the same order. The loss of each branch is compared with the loss of the branch
that has the smallest batch.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from lamb_tpu.optim.checks import check_range, check_whole


class Excess(NamedTuple):
    """Relative excess of a batch's mean loss over the mean loss of the smallest batch."""

    mean: float  # the excess; infinite if a branch has diverged
    error: float  # the standard error of the excess over seeds; NaN for one seed


class Critical(NamedTuple):
    """The critical batch at a point of a run, in examples."""

    # The largest measured batch within the tolerance, if all smaller measured batches are within it
    # too.
    batch: int
    # The batch at which the excess reaches the tolerance, interpolated between two measured
    # batches; equals `batch` if the larger of the two diverged, or if all batches are within the
    # tolerance.
    crossing: float
    # Whether a measured batch exceeds the tolerance; if not, the critical batch may be larger.
    beyond: bool


def excess(losses: Sequence[float], references: Sequence[float]) -> Excess:
    """Returns the relative excess of a batch's mean loss over the mean loss of the smallest batch.

    The standard error is computed for a ratio of means, with losses paired by seed: branches with the
    same seed train on the same examples, so the effect of these examples on both losses cancels.

    >>> excess([2.5, 3.75], [2.0, 3.0])
    Excess(mean=0.25, error=0.0)

    Args:
      losses: losses of the batch, one for each seed; may be NaN or infinite.
      references: losses of the smallest batch, one for each seed; finite and above 0.

    Raises:
      ValueError: a reference is invalid, or the two sequences differ in length.
    """
    for reference in references:
        if not 0 < reference < math.inf:
            raise ValueError(
                f"the losses of the smallest batch must be finite and above 0, not {reference}"
            )
    pairs = list(zip(losses, references, strict=True))
    if not all(map(math.isfinite, losses)):
        return Excess(math.inf, math.nan)
    mean = statistics.fmean(references)
    ratio = statistics.fmean(losses) / mean
    if len(pairs) == 1:
        return Excess(ratio - 1, math.nan)
    residuals = [loss - ratio * reference for loss, reference in pairs]
    return Excess(ratio - 1, statistics.stdev(residuals) / math.sqrt(len(pairs)) / mean)


def critical(batches: Sequence[int], excesses: Sequence[float], tolerance: float) -> Critical:
    """Returns the critical batch, from the excess that was measured at several batch sizes.

    If a smaller batch exceeds the tolerance, a larger batch within the tolerance does not count,
    because noise can be the reason. Between two batches the excess is interpolated linearly in the
    logarithm of the batch size.

    >>> critical([64, 128, 256], [0.0, 0.002, 0.018], tolerance=0.01)
    Critical(batch=128, crossing=181.01933598375618, beyond=True)
    >>> critical([64, 128, 256], [0.0, -0.001, 0.004], tolerance=0.01)
    Critical(batch=256, crossing=256.0, beyond=False)

    Args:
      batches: batch sizes in examples, ascending.
      excesses: the mean excess of each batch, see `excess`; 0 for the first batch.
      tolerance: the largest allowed excess, at least 0.

    Raises:
      ValueError: an argument is invalid, or the excess of the first batch exceeds the tolerance.
    """
    check_range("tolerance", tolerance)
    for batch in batches:
        check_whole("batch", batch, lowest=1)
    if not batches or any(a >= b for a, b in itertools.pairwise(batches)):
        raise ValueError(f"batches={list(batches)} must be a non-empty, strictly increasing list")
    points = list(zip(batches, excesses, strict=True))
    if not points[0][1] <= tolerance:
        raise ValueError(f"excesses[0]={points[0][1]} must be at most the tolerance, {tolerance}")
    for (low, before), (high, after) in itertools.pairwise(points):
        if after <= tolerance:
            continue
        # If the larger batch diverged, there is nothing to interpolate: use the smaller batch.
        fraction = (tolerance - before) / (after - before) if math.isfinite(after) else 0.0
        return Critical(low, low * (high / low) ** fraction, True)
    return Critical(batches[-1], float(batches[-1]), False)
