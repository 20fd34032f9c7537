"""Exchanges: forms in which gradients are sent between devices.

`config.parallel.exchange` chooses one by its name and gives its options. `base` says what an
exchange has; `placing` puts any of them into the step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange.aps import Aps
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.cast import BFloat16, Cast
from lamb_tpu.parallel.exchange.dgc import DGC
from lamb_tpu.parallel.exchange.error_feedback import EF14, EF21, EControl
from lamb_tpu.parallel.exchange.lgreco import LGreCo
from lamb_tpu.parallel.exchange.onebit import OneBit
from lamb_tpu.parallel.exchange.placing import Placed
from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from lamb_tpu.parallel.exchange.topk import TopK
from lamb_tpu.parallel.layout import Layout

# Classes by name; a class' fields after `axes` and `num_devices` are the options.
EXCHANGES: dict[str, type] = {
    "float32": Cast,
    "bfloat16": BFloat16,
    "aps": Aps,
    "onebit": OneBit,
    "topk": TopK,
    "dgc": DGC,
    "ef14": EF14,
    "ef21": EF21,
    "econtrol": EControl,
    "powersgd": PowerSGD,
    "lgreco": LGreCo,
}


def exchange_over(
    mesh: Mesh, name: str | type = "float32", options: Mapping[str, Any] | None = None
) -> Exchange:
    """Returns the exchange of a name over a mesh.

    Where the mesh has the axes data and fsdp, an exchange other than float32 and bfloat16 sums over
    data alone, see `placing`.

    Args:
      mesh: over all devices.
      name: one of `EXCHANGES`, or a class like them.
      options: fields of its class.

    Raises:
      ValueError: an option is out of its range.
    """
    made = EXCHANGES[name] if isinstance(name, str) else name
    axes = mesh_lib.batch_axes(mesh)
    if not issubclass(made, Cast):
        # The outer one that has several devices.
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)[:1] or axes[:1]
    count = math.prod(mesh.shape[axis] for axis in axes)
    found: Exchange = made(axes, count, **(options or {}))
    return found


def make_exchange(
    layout: Layout,
    name: str | type = "float32",
    options: Mapping[str, Any] | None = None,
    full_precision: Sequence[str] = (),
) -> Placed:
    """Returns the exchange of a name, between the devices of a layout.

    Args:
      layout: the shardings of parameters and moments.
      name, options: see `exchange_over`.
      full_precision: regular expressions over the paths of leaves that are summed in float32.
    """
    return Placed(layout, exchange_over(layout.mesh, name, options), tuple(full_precision))


__all__ = [
    "DGC",
    "EF14",
    "EF21",
    "EXCHANGES",
    "Aps",
    "BFloat16",
    "Cast",
    "EControl",
    "Exchange",
    "LGreCo",
    "OneBit",
    "Placed",
    "PowerSGD",
    "Residual",
    "TopK",
    "exchange_over",
    "make_exchange",
]
