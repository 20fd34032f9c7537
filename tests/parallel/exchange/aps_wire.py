"""Bytes that APS sends, by the compiler: `python -m tests.parallel.exchange.aps_wire v5e-16`.

A process of its own, because the one of the tests simulates CPU devices. Prints a JSON object.
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
from lamb_tpu.parallel.exchange.aps import Aps
from tests.parallel.wire import wire_bytes

# A matrix larger than the others, small vectors, and lengths that nothing divides: 4.3 M values.
SHAPES = {
    "embedding": (4099, 512),
    "kernel": (2560, 768),
    "head": (768, 257),
    "bias": (257,),
    "scale": (3,),
    "conv": (3, 3, 5, 7),
    "scalar": (),
}
VALUES = sum(math.prod(shape) for shape in SHAPES.values())
FORMATS = {"e4m3": (4, 3), "e3m0": (3, 0), "e5m10": (5, 10), "e3m2": (3, 2)}


def program(mesh: Mesh, **options: Any) -> Any:
    """Compiles the exchange of a tree of `SHAPES` over all axes of a mesh."""
    exchange = Aps(tuple(mesh.axis_names), mesh.size, **options)
    grads = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    mapped = jax.shard_map(
        lambda grads: exchange.reduce(grads, exchange.init(grads))[0],
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped).lower(grads).compile()


def report(mesh: Mesh, **options: Any) -> dict[str, Any]:
    """Returns the bytes of a program by dtype, and its collectives in words."""
    text = program(mesh, **options).as_text()
    rows = [
        f"{one.count} {one.kind} {one.dtype} {one.operand_bytes}"
        for one in traffic.collectives(text)
    ]
    return {"sent": wire_bytes(text), "collectives": rows}


def float32_bytes(num_devices: int) -> float:
    """Bytes that a device sends for a reduce-scatter and an all-gather of the tree in float32."""
    return 2 * 4 * VALUES * (num_devices - 1) / num_devices


def main() -> None:
    """Compiles formats of 8 and of 4 bits for the slices named on the command line."""
    found = {}
    for name in sys.argv[1:]:
        devices = topology.devices(topology.topology(name))
        mesh = Mesh(np.array(devices), ("data",))
        found[name] = {
            fmt: report(mesh, exponent_bits=FORMATS[fmt][0], mantissa_bits=FORMATS[fmt][1])
            for fmt in ("e4m3", "e3m0")
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
