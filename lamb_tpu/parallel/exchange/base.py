"""The interface of an exchange of gradients, and the residual that it keeps."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Residual(NamedTuple):
    """State of an exchange between updates.

    Attributes:
      device: pytree whose leaves differ between devices. What counts is their sum over devices,
        such as the error of a compression or momentum of the own gradient.
      split: pytree of flat vectors (length,), each device's equal chunk of one long padded vector.
      whole: pytree that is the same on every device, such as counts.
    """

    device: Any = ()
    split: Any = ()
    whole: Any = ()


class Exchange(Protocol):
    """A way to sum the devices' gradients.

    An implementation is a frozen dataclass, so that it is hashable. Its first fields are
    `axes: tuple[str, ...]`, the mesh axes to sum over, and `num_devices: int`, the product of their
    sizes; its options follow, with defaults. `__post_init__` raises a ValueError of one sentence
    that begins with the name of the option.

    Attributes:
      axes: mesh axes to sum over.
      num_devices: number of devices along them.
    """

    axes: tuple[str, ...]
    num_devices: int

    @property
    def has_momentum(self) -> bool:
        """Returns True if the sums contain a momentum; the optimizer must then have none."""
        return False

    def init(self, params: Any) -> Residual:
        """Returns one device's residual before the first update.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s with the shapes of the gradient.
        """

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        """Returns the sums over devices, whole on each of them, and the new residual.

        It runs inside shard_map, or vmap with axis names.

        Args:
          grads: this device's share of the gradient.
          residual: this device's residual.
        """

    def reset(self, residual: Residual) -> Residual:
        """Returns the residual without the values of earlier sums; by default all zeros.

        An optimizer that begins to send another quantity asks for it, see `optim.staged.Stage`. An
        exchange whose residual also holds other values, such as factors to begin with, keeps them.

        Args:
          residual: of one device, as `placing.Placed.init` shapes it.
        """
        return zeros(residual)

    def skipped(self, before: Residual, after: Residual) -> Residual:
        """Returns the residual after a skipped update; by default the one before it.

        Args:
          before: the residual before the update, shaped as for `reset`.
          after: what `reduce` returned from a gradient that is not finite.
        """
        return before

    def at(self, update: int) -> "Exchange":
        """Returns the exchange of the update after `update` completed ones; by default itself.

        Those of one stage are equal, and a program is compiled for each stage. The residual has the
        same structure in all stages.
        """
        return self

    def due(self, update: int) -> bool:
        """Returns whether `chosen` may return another exchange after `update` completed ones."""
        return False

    def chosen(self, params: Any, whole: Any) -> "Exchange":
        """Returns the exchange with what it takes from the state, such as ranks.

        A program is compiled for each result. It is called before the first update of a start and
        where `due`; in between it must return the same, as a run is resumed anywhere.

        Args:
          params: as for `init`.
          whole: `Residual.whole`, on the devices.
        """
        return self


def zeros(tree: Any) -> Any:
    """Returns a tree of zeros with the shapes and dtypes of another."""
    return jax.tree.map(jnp.zeros_like, tree)
