"""Exchanges: ways to sum gradients over devices. Most exchanges send fewer bytes than float32 would.

`config.parallel.exchange` has the name of an exchange and its options. `base` defines the interface
of an exchange; `sharded` connects an exchange with the step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from lamb_tpu.components import Field, Registry, fields_of
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange.aps import Aps
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.cast import BFloat16, Cast
from lamb_tpu.parallel.exchange.dgc import DGC
from lamb_tpu.parallel.exchange.error_feedback import EF14, EF21, EControl, TopK
from lamb_tpu.parallel.exchange.lgreco import LGreCo
from lamb_tpu.parallel.exchange.onebit import OneBit
from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from lamb_tpu.parallel.exchange.sharded import ShardedExchange
from lamb_tpu.parallel.layout import Layout


def _fields(exchange: type) -> dict[str, Field]:
    found = fields_of(exchange, ("axes", "num_devices"))
    # `Cast` has no option `full_precision`, because it sends all leaves in their dtype.
    return found if exchange is Cast else found | {"full_precision": Field(tuple[str, ...], ())}


EXCHANGES = Registry(
    "exchange",
    {
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
    },
    section="parallel.exchange",
    fields=_fields,
)


def exchange_over(
    mesh: Mesh, name: str | type = "float32", options: Mapping[str, Any] | None = None
) -> Exchange:
    """Returns an exchange over the batch axes of a mesh.

    If the mesh has several devices along both data and fsdp, an exchange other than float32 and
    bfloat16 sums only over data, see `sharded`.

    Args:
      mesh: the mesh over all devices.
      name: a name in `EXCHANGES`, or a subclass of `Exchange`.
      options: values of the exchange's fields, other than `axes` and `num_devices`.

    Raises:
      ValueError: an option is out of its range.
    """
    made = EXCHANGES[name] if isinstance(name, str) else name
    axes = mesh_lib.batch_axes(mesh)
    if not issubclass(made, Cast):
        # The outermost axis with several devices.
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)[:1] or axes[:1]
    count = math.prod(mesh.shape[axis] for axis in axes)
    found: Exchange = made(axes, count, **(options or {}))
    return found


def make_exchange(
    layout: Layout,
    name: str | type = "float32",
    options: Mapping[str, Any] | None = None,
    full_precision: Sequence[str] = (),
) -> ShardedExchange:
    """Returns the exchange of `exchange_over`, connected with a layout for use in the step.

    `full_precision` has regular expressions over the paths of leaves to sum in float32.
    """
    return ShardedExchange(layout, exchange_over(layout.mesh, name, options), tuple(full_precision))


__all__ = [
    "EXCHANGES",
    "BFloat16",
    "Cast",
    "Exchange",
    "Residual",
    "ShardedExchange",
    "exchange_over",
    "make_exchange",
]
