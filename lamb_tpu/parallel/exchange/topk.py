"""Top-k sparsification: the largest values of the gradient plus the error so far are sent."""

import dataclasses
from typing import Any

from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.error_feedback import EF14


@dataclasses.dataclass(frozen=True)
class TopK(Exchange):
    """Sends the values of the largest magnitude and their indices; the others wait.

    Each device sends its own choice from its gradient plus what it has not sent yet (EF14). Sent
    are 8 bytes for each value, from every device to every other.

    Attributes:
      axes: the mesh axes to sum over.
      num_devices: number of devices along these axes.
      ratio: the fraction of values that is sent, in (0, 1].
      layerwise: whether this fraction is of each leaf; otherwise of all of them as one vector.

    Source: Stich et al., Sparsified SGD with Memory, arXiv:1809.07599.
    """

    axes: tuple[str, ...]
    num_devices: int
    ratio: float = 0.01
    layerwise: bool = False

    def __post_init__(self) -> None:
        self._feedback()

    def init(self, params: Any) -> Residual:
        return self._feedback().init(params)

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        return self._feedback().reduce(grads, residual)

    def _feedback(self) -> EF14:
        return EF14(self.axes, self.num_devices, "topk", self.ratio, self.layerwise)
