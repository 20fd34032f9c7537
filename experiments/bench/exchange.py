"""Time of the exchanges of gradients on simulated devices, and the compiler's estimate for a TPU.

  python -m experiments.bench.exchange --write
  python -m experiments.bench.exchange --topology=v3-8 --layers=24 --width=1024

The gradient is BERT's tree, 24 layers of width 1,024 for BERT-Large; the default is small enough
for 8 simulated devices in 24 GiB. Every exchange sums it over all devices, in turns, so that what
else the machine does falls on all of them. Simulated devices send through memory, so the time is
that of casts, packing and sums; what a network would save is in the bytes. With --topology nothing
is run: the time is what the TPU compiler expects of the core, without the network.
"""

import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from experiments.bench import bert
from lamb_tpu import cli
from lamb_tpu.cluster import cpu_devices
from lamb_tpu.cluster.host import num_cores, processor
from lamb_tpu.cost import topology, traffic
from lamb_tpu.cost.hlo import program_cost
from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.parallel.exchange.base import Exchange

# Options beside the defaults, which every exchange is measured with, by what the table calls them.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "aps": {
        "e3m0": {"exponent_bits": 3, "mantissa_bits": 0},
        "without shift": {"shift": False},
        "Kahan": {"kahan": True},
    }
}
BASELINE = "float32"
_AXIS = "data"
_PROGRESS = Console(stderr=True)


class Row(NamedTuple):
    """Cost of one exchange."""

    seconds: float  # median of the turns, or the compiler's estimate
    sent_bytes: int  # by one device
    temporary_bytes: int  # of one device


def contenders(num_devices: int) -> dict[str, Exchange]:
    """Returns every exchange that is registered, and its variants, by the name in the table."""
    found = {}
    for name, made in EXCHANGES.items():
        found[name] = made((_AXIS,), num_devices)
        for label, options in VARIANTS.get(name, {}).items():
            found[f"{name}, {label}"] = made((_AXIS,), num_devices, **options)
    return found


def compiled(exchange: Exchange, mesh: Mesh, num_layers: int, width: int) -> tuple[Any, Any]:
    """Compiles the sum of BERT's gradients, with the exchange's residual in and out.

    Returns:
      The program `(grads, residual) -> (sums, residual)`, its second argument donated, and the
      shapes of its arguments. Each of them has an axis for the devices in front.
    """
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        bert.bert_shapes(num_layers, width, False),
        is_leaf=lambda value: isinstance(value, tuple),
    )

    def reduce(*given: Any) -> Any:
        found = exchange.reduce(*jax.tree.map(lambda leaf: leaf[0], given))
        return jax.tree.map(lambda leaf: leaf[None], found)

    spec = PartitionSpec(_AXIS)
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (mesh.size, *leaf.shape), leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        (shapes, jax.eval_shape(exchange.init, shapes)),
    )
    # Sums replace nothing: the gradients are given again in the next turn.
    return jax.jit(mapped, donate_argnums=1).lower(*arguments).compile(), arguments


def sent(program: Any) -> int:
    """Returns the bytes that a device sends in one run."""
    return sum(one.count * one.sent_bytes for one in traffic.collectives(program.as_text()))


def measure(mesh: Mesh, num_layers: int, width: int, rounds: int) -> dict[str, Row]:
    """Times every exchange on the devices of the mesh."""
    programs, grads = {}, None
    exchanges = contenders(mesh.size)
    for name, exchange in track(exchanges.items(), "Compiling", console=_PROGRESS):
        programs[name], arguments = compiled(exchange, mesh, num_layers, width)
        if grads is None:
            grads = _random(arguments[0])
    residuals: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in track(range(rounds + 1), "Measuring", console=_PROGRESS):
        for name, program in programs.items():
            # A turn of its own for each, with its residual made anew, so that one is held at most.
            residuals = {name: _start(exchanges[name], mesh, grads)}
            jax.block_until_ready(residuals)
            begun = time.perf_counter()
            jax.block_until_ready(program(grads, residuals[name]))
            if turn:  # the first is not counted
                seconds[name].append(time.perf_counter() - begun)
    return {
        name: Row(
            statistics.median(seconds[name]),
            sent(program),
            program.memory_analysis().temp_size_in_bytes,
        )
        for name, program in programs.items()
    }


def estimate(mesh: Mesh, clock: float, num_layers: int, width: int) -> dict[str, Row]:
    """Returns the TPU compiler's estimates; `clock` is the core's, in Hz."""
    rows = {}
    exchanges = contenders(mesh.size)
    for name, exchange in track(exchanges.items(), "Compiling", console=_PROGRESS):
        program, _ = compiled(exchange, mesh, num_layers, width)
        cycles = program_cost(program.as_text()).cycles
        temporary = program.memory_analysis().temp_size_in_bytes
        rows[name] = Row(cycles / clock, sent(program), temporary)
    return rows


def _random(shapes: Any) -> Any:
    """Returns gradients of very different sizes, other ones on each device."""
    leaves, treedef = jax.tree.flatten(shapes)

    def draw(index: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        make: Callable[[jax.Array], jax.Array] = jax.jit(
            lambda key: 10.0 ** -(index % 7) * jax.random.normal(key, leaf.shape, leaf.dtype),
            out_shardings=leaf.sharding,
        )
        return make(jax.random.key(index))

    return treedef.unflatten([draw(index, leaf) for index, leaf in enumerate(leaves)])


def _start(exchange: Exchange, mesh: Mesh, grads: Any) -> Any:
    """Returns every device's residual before the first update."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), grads)
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))

    def every() -> Any:
        one = exchange.init(shapes)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (mesh.size, *jnp.shape(leaf))), one)

    return jax.jit(every, out_shardings=sharding)()


def table(rows: dict[str, Row]) -> str:
    """Returns the rows as Markdown."""
    base = rows[BASELINE]
    lines = [
        "| exchange | ms | of float32 | MB sent by a device | of float32 | temporary MiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {1e3 * row.seconds:.1f} | {row.seconds / base.seconds:.2f} | "
            f"{row.sent_bytes / 1e6:.2f} | {row.sent_bytes / base.sent_bytes:.4f} | "
            f"{row.temporary_bytes / 2**20:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures or estimates, prints the table and writes it if asked."""
    values = flags.FLAGS
    size = values.layers, values.width
    command = f"--layers={values.layers} --width={values.width}"
    if values.topology:
        slice_ = topology.topology(values.topology)
        mesh = Mesh(np.array(topology.devices(slice_)), (_AXIS,))
        rows, command = (
            estimate(mesh, slice_.generation.clock, *size),
            f"{command} --topology={slice_.name}",
        )
        where = f"{mesh.size} devices of {slice_.name}, by its compiler's estimate of the core"
    else:
        cpu_devices.make(values.devices)
        mesh = Mesh(np.array(jax.devices()), (_AXIS,))
        rows, command = (measure(mesh, *size, values.rounds), f"{command} --rounds={values.rounds}")
        where = f"{mesh.size} simulated devices, {processor()}, {num_cores()} core(s)"
    text = (
        f"Gradients of BERT with {size[0]} layers of width {size[1]}, "
        f"{bert.num_values(*size) / 1e6:.1f} M values in {len(bert.leaf_shapes(*size))} leaves, "
        f"summed over {where}; jax {jax.__version__}.\n"
        f"Command: `python -m experiments.bench.exchange {command}`\n\n{table(rows)}"
    )
    print(text, end="")
    if values.write:
        name = f"exchange_{values.topology}.md" if values.topology else "exchange.md"
        pathlib.Path(__file__).with_name(name).write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("layers", 6, "Transformer layers.", lower_bound=1)
    flags.DEFINE_integer("width", 512, "Of the hidden layer.", lower_bound=2)
    flags.DEFINE_integer("rounds", 7, "Turns of each.", lower_bound=1)
    flags.DEFINE_integer("devices", 8, "Simulated devices.", lower_bound=2)
    flags.DEFINE_string("topology", None, "A TPU slice to compile for, such as v3-8.")
    flags.DEFINE_bool("write", False, "Whether to write the table beside this file.")
    cli.run_main(main)
