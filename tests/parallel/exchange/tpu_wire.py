"""Bytes that exchanges send in compiled TPU programs, and the minimum for each exchange.

`python -m tests.parallel.exchange.tpu_wire onebit,topk v5e-16 v3-128` prints a JSON object. The
command runs in a separate process, because the process of the tests simulates CPU devices.
"""

import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lamb_tpu.cost import topology, traffic
from lamb_tpu.parallel.exchange import EXCHANGES, Exchange
from tests.parallel.exchange import over
from tests.parallel.wire import wire_bytes

# Large and small matrices, small vectors, and indivisible lengths: 4.3 million values.
SHAPES = {
    "embedding": (4099, 512),
    "kernel": (2560, 768),
    "head": (768, 257),
    "bias": (257,),
    "scale": (3,),
    "conv": (3, 3, 5, 7),
    "scalar": (),
}
SIZES = [math.prod(shape) for shape in SHAPES.values()]
RATIO, RANK = 0.001, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit": {},
    "topk": {"ratio": RATIO},
    "dgc": {"ratio": RATIO},
    "powersgd": {"rank": RANK},
    "aps e4m3": {},
    "aps e3m0": {"exponent_bits": 3, "mantissa_bits": 0},
}


def least(name: str, num_devices: int) -> float:
    """Returns the minimum bytes that a device sends for `SHAPES`, without scales and vectors."""
    others = num_devices - 1
    if name == "onebit":  # a bit per value in each direction
        return 2 * sum(SIZES) / 8 * others / num_devices
    if name == "topk":  # one value in a thousand, with its index
        return 8 * RATIO * sum(SIZES) * others
    matrices = [shape for shape in SHAPES.values() if len(shape) > 1]
    if name == "dgc":
        return 8 * RATIO * sum(map(math.prod, matrices)) * others
    factors = sum(RANK * (math.prod(shape[:-1]) + shape[-1]) for shape in matrices)
    return 2 * 4 * factors * others / num_devices  # an all-reduce of both factors


def report(mesh: Mesh, exchange: Exchange) -> dict[str, Any]:
    """Returns the bytes of a program by dtype, and its collectives as text."""
    grads = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    text = over.program(exchange, mesh, grads)
    rows = [
        f"{one.count} {one.kind} {one.dtype} {one.operand_bytes}"
        for one in traffic.collectives(text)
    ]
    return {"sent": wire_bytes(text), "collectives": rows}


def main() -> None:
    """Compiles the exchanges for the slices on the command line, and prints the reports."""
    actual: dict[str, Any] = {}
    for slice_name in sys.argv[2:]:
        devices = topology.devices(topology.topology(slice_name))
        mesh = Mesh(np.array(devices), ("data",))
        for name in sys.argv[1].split(","):
            exchange = EXCHANGES[name.split()[0]](("data",), mesh.size, **OPTIONS[name])
            actual.setdefault(slice_name, {})[name] = report(mesh, exchange)
    print(json.dumps(actual))


if __name__ == "__main__":
    main()
