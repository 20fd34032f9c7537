"""Exchanges that send gradients in a given dtype, without a residual."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.types import PyTree


@dataclasses.dataclass(frozen=True)
class Cast(Exchange):
    """Sums gradients in their dtype; subclasses cast gradients to `dtype` before they are sent."""

    dtype: ClassVar[Any] = None  # None: the dtype of each leaf
    rounds_only: ClassVar[bool] = True

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        return collectives.all_reduce(grads, self.axes, self.dtype), residual


@dataclasses.dataclass(frozen=True)
class BFloat16(Cast):
    """Casts gradients to bfloat16 before they are sent and added."""

    dtype: ClassVar[Any] = jnp.bfloat16
