"""The critical batch: the largest at which equal examples still give about the same loss.

It is measured by branches: from one checkpoint a run goes on at several batches, each for the same
examples in the same order, and their losses are compared with that of the smallest batch.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from lamb_tpu.optim.checks import check_range, check_whole


class Excess(NamedTuple):
    """Relative excess of a batch's mean loss over that of the smallest batch."""

    mean: float  # infinite where a branch has diverged
    error: float  # its standard error over seeds; NaN for one seed


class Critical(NamedTuple):
    """The critical batch at a place of a run, in examples.

    Attributes:
      batch: the largest measured batch up to which every one stays within the tolerance.
      crossing: where the excess passes the tolerance, interpolated between two measured batches;
        `batch` itself if the larger one has diverged, or if none was beyond.
      beyond: whether a measured batch was beyond the tolerance; otherwise the critical batch is
        `batch` or more.
    """

    batch: int
    crossing: float
    beyond: bool


def excess(losses: Sequence[float], references: Sequence[float]) -> Excess:
    """Returns the relative excess of a batch's mean loss over that of the smallest batch.

    The standard error is that of a ratio of means whose losses are paired by seed: branches of one
    seed read the same examples, so what these add to both losses cancels.

    >>> excess([2.5, 3.75], [2.0, 3.0])
    Excess(mean=0.25, error=0.0)

    Args:
      losses: of the batch, one for each seed; may be NaN or infinite.
      references: of the smallest batch, as many.

    Raises:
      ValueError: a reference that is not finite and above 0, or sequences of different lengths.
    """
    for reference in references:
        if not 0 < reference < math.inf:
            raise ValueError(f"a loss to compare with must be above 0 and finite, not {reference}")
    pairs = list(zip(losses, references, strict=True))
    if not all(map(math.isfinite, losses)):
        return Excess(math.inf, math.nan)
    mean = statistics.fmean(references)
    ratio = statistics.fmean(losses) / mean
    if len(pairs) == 1:
        return Excess(ratio - 1, math.nan)
    rests = [loss - ratio * reference for loss, reference in pairs]
    return Excess(ratio - 1, statistics.stdev(rests) / math.sqrt(len(pairs)) / mean)


def critical(batches: Sequence[int], excesses: Sequence[float], tolerance: float) -> Critical:
    """Returns the critical batch of an excess measured at several batches.

    A larger batch within the tolerance behind one beyond it does not count: noise can put it there.
    Between two batches the excess is taken as linear in the batch's logarithm.

    >>> critical([64, 128, 256], [0.0, 0.002, 0.018], tolerance=0.01)
    Critical(batch=128, crossing=181.01933598375618, beyond=True)
    >>> critical([64, 128, 256], [0.0, -0.001, 0.004], tolerance=0.01)
    Critical(batch=256, crossing=256.0, beyond=False)

    Args:
      batches: in examples, ascending.
      excesses: mean excess of each, see `excess`; 0 for the first.
      tolerance: largest excess that is allowed.

    Raises:
      ValueError: batches that are no ascending whole numbers, a first excess beyond the tolerance,
        or a negative tolerance.
    """
    check_range("tolerance", tolerance)
    for batch in batches:
        check_whole("a batch", batch, lowest=1)
    if not batches or any(a >= b for a, b in itertools.pairwise(batches)):
        raise ValueError(f"batches must ascend, not {list(batches)}")
    points = list(zip(batches, excesses, strict=True))
    if not points[0][1] <= tolerance:
        raise ValueError(f"the first excess must be within the tolerance, not {points[0][1]}")
    for (low, before), (high, after) in itertools.pairwise(points):
        if after <= tolerance:
            continue
        # The part of the way to an infinite excess is 0.
        part = (tolerance - before) / (after - before) if math.isfinite(after) else 0.0
        return Critical(low, low * (high / low) ** part, True)
    return Critical(batches[-1], float(batches[-1]), False)
