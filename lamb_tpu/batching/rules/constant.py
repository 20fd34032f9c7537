"""A batch size that never changes."""

import dataclasses
from collections.abc import Mapping

from lamb_tpu.batching.rules.base import Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Rule):
    """Keeps the batch size with which training begins.

    >>> Constant(quantum=8).next_batch(64, {}, examples=10_000)
    64
    """

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the present batch size."""
        del statistics, examples
        return batch
