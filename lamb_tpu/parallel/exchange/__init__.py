"""Exchanges: forms in which gradients are sent between devices.

An exchange has `init(params)` and `reduce(grads, residual) -> (grads, residual)` inside shard_map.
The residual is a part of a device's gradient that is kept until the next update, such as the error
of a compression. `config.parallel.gradient_dtype` chooses the exchange.
"""

from typing import Any, Protocol

from lamb_tpu.parallel.exchange.cast import Cast
from lamb_tpu.parallel.layout import Layout


class Exchange(Protocol):
    """A way to sum the devices' gradients."""

    def init(self, params: Any) -> Any:
        """Returns the residual before the first update; () for an exchange that keeps none."""

    def reduce(self, grads: Any, residual: Any) -> tuple[Any, Any]:
        """Returns the sums over devices, placed as the optimizer's state, and the new residual.

        Args:
          grads: this device's gradients, not split.
          residual: this device's residual.
        """


def make_exchange(layout: Layout, gradient_dtype: Any = None) -> Exchange:
    """Returns the exchange that sends gradients in `gradient_dtype`; None: in their own dtype."""
    return Cast(layout, gradient_dtype)
