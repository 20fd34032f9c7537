"""Gradients sent in one dtype, without a residual."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange.base import Exchange, Residual


@dataclasses.dataclass(frozen=True)
class Cast(Exchange):
    """Casts gradients before they are sent and added; this one sends them in their own dtype.

    Attributes:
      axes: the mesh axes to sum over.
      num_devices: number of devices along these axes.
    """

    axes: tuple[str, ...]
    num_devices: int

    dtype: ClassVar[Any] = None  # None: that of each leaf

    def init(self, params: Any) -> Residual:
        return Residual()

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        return collectives.all_reduce(grads, self.axes, self.dtype), residual


@dataclasses.dataclass(frozen=True)
class BFloat16(Cast):
    """Casts gradients to bfloat16 before they are sent and added."""

    dtype: ClassVar[Any] = jnp.bfloat16
