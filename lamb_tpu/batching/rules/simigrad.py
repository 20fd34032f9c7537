r"""SimiGrad: the batch that keeps the cosine of two half gradients at a target.

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
    """Grows by a tenth where two half gradients differ too much, else shrinks by a tenth.

    Needs the statistic `similarity`, see `batching.similarity`. At exactly the target, or at NaN,
    the batch stays.

    >>> rule = SimiGrad(quantum=8, target=0.9, upper=1024)
    >>> [rule.next_batch(160, {'similarity': cosine}, 0) for cosine in (0.8, 0.9, 0.95)]
    [176, 160, 144]

    Attributes:
      target: the cosine to keep, in [-1, 1]; 0.8 in the authors' script for BERT-Large.
      smoothing: None, or the weight in [0, 1) that `wanted_batch` describes.
    """

    needs = (SIMILARITY,)

    target: float
    smoothing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.target) or not -1 <= self.target <= 1:
            raise ValueError(f"target must be a cosine in [-1, 1], not {self.target!r}")
        if self.smoothing is not None and not (
            is_number(self.smoothing) and 0 <= self.smoothing < 1
        ):
            raise ValueError(
                f"smoothing must be at least 0 and below 1, or None, not {self.smoothing!r}"
            )

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> int:
        """Returns the batch size within the bounds, before it is rounded to whole quanta."""
        return wanted_batch(
            batch,
            read(statistics, SIMILARITY),
            self.target,
            batch // self.quantum,
            self.smallest,
            self.upper,
            self.smoothing,
        )

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns what is wanted, rounded by `whole_quanta`."""
        del examples
        return whole_quanta(self.wanted(batch, statistics), batch, self.quantum)


def wanted_batch(
    batch: int,
    similarity: float,
    target: float,
    num_microbatches: int,
    lower: int,
    upper: int,
    smoothing: float | None = None,
) -> int:
    """Returns the batch size that the published code calls its target, in examples.

    With `smoothing` s it is s times the number of microbatches plus 1 - s times the new batch, as
    published: not of the present batch. So it pulls the batch down whatever the similarity is.

    Args:
      batch: the present batch size, in examples.
      similarity: the cosine of two half gradients.
      target: the cosine to keep.
      num_microbatches: accumulation steps of the present batch.
      lower: the smallest batch size, any number.
      upper: the largest.
      smoothing: s, or None.
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


def whole_quanta(wanted: int, batch: int, quantum: int) -> int:
    """Returns the wanted batch rounded down to whole quanta, at least one.

    One quantum more where more than the present batch is wanted and rounding would lose it.

    >>> [whole_quanta(wanted, 24, 8) for wanted in (21, 24, 26, 40)]
    [16, 24, 32, 40]
    """
    if wanted == batch:
        return batch
    quanta = max(1, wanted // quantum)
    if wanted > batch and quanta * quantum <= batch:
        quanta += 1
    return quanta * quantum
