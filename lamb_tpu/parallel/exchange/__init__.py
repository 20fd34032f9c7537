"""Exchanges: forms in which gradients are sent between devices.

`config.parallel.exchange` chooses one by its name and gives its options. `base` says what an
exchange has; `placing` puts any of them into the step.
"""

from collections.abc import Mapping
from typing import Any

from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.cast import BFloat16, Cast
from lamb_tpu.parallel.exchange.placing import Placed
from lamb_tpu.parallel.layout import Layout

# Classes by name; a class' fields after `axes` and `num_devices` are the options.
EXCHANGES: dict[str, type] = {
    "float32": Cast,
    "bfloat16": BFloat16,
}


def make_exchange(
    layout: Layout, name: str = "float32", options: Mapping[str, Any] | None = None
) -> Placed:
    """Returns the exchange of a name, in the step of a layout.

    Raises:
      ValueError: an option is out of its range.
    """
    axes = mesh_lib.batch_axes(layout.mesh)
    return Placed(
        layout, EXCHANGES[name](axes, mesh_lib.num_batch_shards(layout.mesh), **(options or {}))
    )


__all__ = ["EXCHANGES", "BFloat16", "Cast", "Exchange", "Residual", "make_exchange"]
