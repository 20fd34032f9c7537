"""The interface of an exchange of gradients, and its residual."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lamb_tpu.errors import ArgumentError
from lamb_tpu.types import Params, PyTree


class Residual(NamedTuple):
    """State of an exchange between updates.

    Attributes:
      device: pytree of arrays that differ between devices, such as the error of a compression or the
        momentum of a device's gradient. Later results depend only on the arrays' sums over devices.
      split: pytree of flat vectors (length,): each is this device's chunk of one long padded vector.
      whole: pytree of arrays that are equal on all devices, such as counts.
    """

    device: Any = ()
    split: Any = ()
    whole: Any = ()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A way to sum the devices' gradients.

    A subclass must be a frozen dataclass, so that it is hashable. The fields that it adds are its
    options, and have defaults. If an option is invalid, `__post_init__` raises a ValueError with a
    message of one sentence that begins with the name of the option.

    Attributes:
      axes: mesh axes to sum over.
      num_devices: number of devices along these axes, the product of their sizes.
      rounds_only: whether the sums equal those in float32 up to rounding, so that the gradients of
        parts of the batch can be compared with the sums.
    """

    rounds_only: ClassVar[bool] = False

    axes: tuple[str, ...]
    num_devices: int

    @property
    def has_momentum(self) -> bool:
        """True if the sums contain a momentum; then the momentum of the optimizer must be 0."""
        return False

    def init(self, params: Params) -> Residual:
        """Returns one device's residual before the first update; by default an empty one.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s with the shapes of the gradient.
        """
        return Residual()

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        """Returns the replicated sums over devices, and the new residual.

        This method is called inside shard_map, or inside vmap with axis names.

        Args:
          grads: this device's share of the gradient.
          residual: this device's residual.
        """
        raise NotImplementedError

    def reset(self, residual: Residual) -> Residual:
        """Returns the residual without the values of earlier sums; by default, a residual of zeros.

        The step calls this method when an optimizer begins to send another quantity, see
        `optim.staged.Stage`. Values of the residual that do not come from earlier sums, such as
        initial factors, must not be reset.

        Args:
          residual: one device's shard of the residual that `sharded.ShardedExchange.init` returns.
        """
        return zeros(residual)

    def skipped(self, before: Residual, after: Residual) -> Residual:
        """Returns the residual after a skipped update; by default the residual before the update.

        Args:
          before: the residual before the update, shaped as for `reset`.
          after: the residual after the update, which `reduce` computed from a gradient that is not
            finite.
        """
        return before

    def at(self, update: int) -> "Exchange":
        """Returns the exchange for the update that follows `update` completed updates.

        By default the exchange returns itself. Updates with equal exchanges form a stage, for which
        a program is compiled. The residual must have the same structure in all stages.
        """
        return self

    def due(self, update: int) -> bool:
        """Returns whether `chosen` may return a different exchange after `update` completed updates."""
        return False

    def chosen(self, params: Params, whole: Any) -> "Exchange":
        """Returns the exchange with values that depend on the residual, such as ranks.

        A program is compiled for each different result. This method is called when a run starts or
        resumes, and when `due` returns True. Between updates that are due the result must not
        change, because a run may resume at any update.

        Args:
          params: as for `init`.
          whole: the arrays of `Residual.whole` in the current state.
        """
        return self


def zeros(tree: PyTree) -> Any:
    """Returns a tree of zeros with the shapes and dtypes of `tree`."""
    return jax.tree.map(jnp.zeros_like, tree)


def check_range(name: str, value: Any, fits: bool, valid: str) -> None:
    """Raises ArgumentError for the option `name` unless `fits`; `valid` describes the valid values."""
    if not fits:
        raise ArgumentError(name, value, "is out of range", f"use {valid}")


def check_momentum(momentum: float) -> None:
    """Raises ArgumentError if a coefficient of momentum is outside [0, 1)."""
    check_range("momentum", momentum, 0 <= momentum < 1, "at least 0 and below 1")


def check_ratio(name: str, ratio: float) -> None:
    """Raises ArgumentError if a fraction of sent values is outside (0, 1]."""
    check_range(name, ratio, 0 < ratio <= 1, "a fraction above 0 and at most 1")
