r"""SimiGrad: changes the batch size to keep the cosine of two halves' gradients near a target.

References:
  Qin et al., SimiGrad: Fine-Grained Adaptive Batching for Large Scale Training using Gradient
  Similarity Measurement, NeurIPS 2021; the abstract and the authors' code, HeyangQin/SimiGrad, were
  read.
"""

import dataclasses
from collections.abc import Mapping

from lamb_tpu.batching.rules.base import Bounded, read
from lamb_tpu.batching.similarity import SIMILARITY
from lamb_tpu.optim.checks import is_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimiGrad(Bounded):
    """Grows or shrinks the batch by a tenth, depending on the similarity of its halves' gradients.

    Needs the statistic `similarity`, the cosine of these gradients, see `batching.similarity`. If
    the cosine is below the target, the batch grows by a tenth; if it is above, the batch shrinks by
    a tenth. If the cosine equals the target or is NaN, the batch does not change.

    >>> rule = SimiGrad(granularity=8, target=0.9, upper=1024)
    >>> [rule.next_batch(160, {'similarity': cosine}, 0) for cosine in (0.8, 0.9, 0.95)]
    [176, 160, 144]

    Attributes:
      target: the target cosine, in [-1, 1]; 0.8 in the authors' script for BERT-Large.
      smoothing: a weight in [0, 1), see `wanted_batch`; None for no smoothing.
    """

    needs = (SIMILARITY,)

    target: float
    smoothing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.target) or not -1 <= self.target <= 1:
            raise ValueError(f"target={self.target!r} must be a cosine in [-1, 1]")
        if self.smoothing is not None and not (
            is_number(self.smoothing) and 0 <= self.smoothing < 1
        ):
            raise ValueError(
                f"smoothing={self.smoothing!r} must be at least 0 and below 1, or None"
            )

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> int:
        """Returns the batch size within the bounds, before rounding to the granularity."""
        return wanted_batch(
            batch,
            read(statistics, SIMILARITY),
            self.target,
            batch // self.granularity,
            self.smallest,
            self.upper,
            self.smoothing,
        )

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the wanted batch, rounded by `round_to_granularity`."""
        del examples
        return round_to_granularity(self.wanted(batch, statistics), batch, self.granularity)


def wanted_batch(
    batch: int,
    similarity: float,
    target: float,
    num_microbatches: int,
    lower: int,
    upper: int,
    smoothing: float | None = None,
) -> int:
    """Returns the next batch size within the bounds, before rounding to the granularity.

    With `smoothing` s, the result is s times the number of microbatches plus (1 - s) times the new
    batch size, as in the published code. Because s multiplies the number of microbatches, and not
    the current batch size, smoothing reduces the batch whatever the similarity is.
    """
    if similarity < target:
        new = max(1, batch + 1, int(1.1 * batch))
    elif similarity > target and batch > 1:
        new = max(1, min(batch - 1, int(0.9 * batch)))
    else:
        return batch
    if smoothing is not None:
        new = int(num_microbatches * smoothing + new * (1 - smoothing))
    return max(min(new, upper), lower)


def round_to_granularity(wanted: int, batch: int, granularity: int) -> int:
    """Returns the wanted batch size, rounded down to a positive multiple of the granularity.

    If the wanted batch is larger than the current batch but the rounded batch is not, one
    granularity is added to the rounded batch.

    >>> [round_to_granularity(wanted, 24, 8) for wanted in (21, 24, 26, 40)]
    [16, 24, 32, 40]
    """
    if wanted == batch:
        return batch
    multiple = max(1, wanted // granularity)
    if wanted > batch and multiple * granularity <= batch:
        multiple += 1
    return multiple * granularity
