"""Bytes that exchanges send, by the TPU compiler, beside the least for each.

`python -m tests.parallel.exchange.tpu_wire onebit,topk v5e-16 v3-128` prints a JSON object. It is a
process of its own, because the one of the tests simulates CPU devices.
"""

import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.cost import topology, traffic
from lamb_tpu.parallel.exchange import EXCHANGES
from tests.parallel.exchange.aps_wire import SHAPES
from tests.parallel.wire import wire_bytes

RATIO, RANK = 0.001, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit": {},
    "topk": {"ratio": RATIO},
    "dgc": {"ratio": RATIO},
    "powersgd": {"rank": RANK},
}


def least(name: str, num_devices: int) -> float:
    """The least bytes that a device sends for a tree of `SHAPES`, without scales and vectors."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    others = num_devices - 1
    if name == "onebit":  # a bit each way
        return 2 * sum(sizes) / 8 * others / num_devices
    if name == "topk":  # value and index of one value in a thousand
        return 8 * RATIO * sum(sizes) * others
    matrices = [shape for shape in SHAPES.values() if len(shape) > 1]
    if name == "dgc":
        return 8 * RATIO * sum(map(math.prod, matrices)) * others
    factors = sum(RANK * (math.prod(shape[:-1]) + shape[-1]) for shape in matrices)
    return 2 * 4 * factors * others / num_devices  # an all-reduce of both factors


def report(mesh: Mesh, name: str) -> dict[str, Any]:
    """Returns the bytes of a program by dtype, the least, and its collectives in words."""
    exchange = EXCHANGES[name](tuple(mesh.axis_names), mesh.size, **OPTIONS[name])
    grads = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    residual = jax.eval_shape(exchange.init, grads)
    # Each device has the same residual here; the bytes are those of any.
    mapped = jax.shard_map(
        exchange.reduce,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    text = jax.jit(mapped).lower(grads, residual).compile().as_text()
    return {
        "sent": wire_bytes(text),
        "least": least(name, mesh.size),
        "collectives": [
            f"{one.count} {one.kind} {one.dtype} {one.operand_bytes}"
            for one in traffic.collectives(text)
        ],
    }


def main() -> None:
    """Compiles the exchanges for the slices that the command line names."""
    found = {}
    names = sys.argv[1].split(",")
    for slice_name in sys.argv[2:]:
        devices = topology.devices(topology.topology(slice_name))
        mesh = Mesh(np.array(devices), ("data",))
        found[slice_name] = {name: report(mesh, name) for name in names}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
