"""Time of gradient exchanges on simulated devices, and the compiler's estimate for a TPU.

  python -m experiments.bench.exchange --write
  python -m experiments.bench.exchange --topology=v3-8 --layers=24 --width=1024

The gradient has the structure of BERT's parameters. The default size is small enough for 8 simulated
devices in 24 GiB; BERT-Large has 24 layers of width 1,024. Every exchange sums the gradient
over all devices. The exchanges alternate, so that other load affects all of them. Simulated devices
communicate through memory, so the times are those of casts, packing and sums; the bytes sent show
how much traffic an exchange would save on a real network. With --topology nothing runs: the time is
the TPU compiler's estimate for the core, without communication.
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

# Options to measure in addition to the defaults: by exchange, then by name in the table.
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

    seconds: float  # median over the rounds, or the compiler's estimate
    sent_bytes: int  # sent by one device
    temporary_bytes: int  # on one device


def contenders(num_devices: int) -> dict[str, Exchange]:
    """Returns every registered exchange and its variants, by the name in the table."""
    exchanges = {}
    for name, made in EXCHANGES.items():
        exchanges[name] = made((_AXIS,), num_devices)
        for label, options in VARIANTS.get(name, {}).items():
            exchanges[f"{name}, {label}"] = made((_AXIS,), num_devices, **options)
    return exchanges


def compiled(exchange: Exchange, mesh: Mesh, num_layers: int, width: int) -> tuple[Any, Any]:
    """Compiles the sum of BERT's gradients, with the exchange's residual as input and output.

    Returns:
      The program `(grads, residual) -> (sums, residual)`, whose second argument is donated, and the
      shapes of its arguments. Each argument has a leading axis of devices.
    """
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        bert.bert_shapes(num_layers, width, False),
        is_leaf=lambda value: isinstance(value, tuple),
    )

    def reduce(*given: Any) -> Any:
        reduced = exchange.reduce(*jax.tree.map(lambda leaf: leaf[0], given))
        return jax.tree.map(lambda leaf: leaf[None], reduced)

    spec = PartitionSpec(_AXIS)
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (mesh.size, *leaf.shape), leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        (shapes, jax.eval_shape(exchange.init, shapes)),
    )
    # The gradients are not donated: the next round uses them again.
    return jax.jit(mapped, donate_argnums=1).lower(*arguments).compile(), arguments


def sent(program: Any) -> int:
    """Returns the bytes that a device sends in one exchange."""
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
    for number in track(range(rounds + 1), "Measuring", console=_PROGRESS):
        for name, program in programs.items():
            # Allocate a residual only while its exchange is timed, so that memory holds only one residual.
            residuals = {name: _start(exchanges[name], mesh, grads)}
            jax.block_until_ready(residuals)
            begun = time.perf_counter()
            jax.block_until_ready(program(grads, residuals[name]))
            if number:  # the first round is a warm-up
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
    """Returns the TPU compiler's estimates; `clock` is the core's clock rate in Hz."""
    rows = {}
    exchanges = contenders(mesh.size)
    for name, exchange in track(exchanges.items(), "Compiling", console=_PROGRESS):
        program, _ = compiled(exchange, mesh, num_layers, width)
        cycles = program_cost(program.as_text()).cycles
        temporary = program.memory_analysis().temp_size_in_bytes
        rows[name] = Row(cycles / clock, sent(program), temporary)
    return rows


def _random(shapes: Any) -> Any:
    """Returns gradients of widely varying magnitude, different on each device."""
    leaves, treedef = jax.tree.flatten(shapes)

    def draw(index: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        make: Callable[[jax.Array], jax.Array] = jax.jit(
            lambda key: 10.0 ** -(index % 7) * jax.random.normal(key, leaf.shape, leaf.dtype),
            out_shardings=leaf.sharding,
        )
        return make(jax.random.key(index))

    return treedef.unflatten([draw(index, leaf) for index, leaf in enumerate(leaves)])


def _start(exchange: Exchange, mesh: Mesh, grads: Any) -> Any:
    """Returns the initial residuals of all devices."""
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
        "| exchange | ms | ms / float32 | MB sent by a device | MB / float32 | temporary MiB |",
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
    """Measures or estimates, prints the table, and writes it if --write is given."""
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
        where = f"{mesh.size} devices of {slice_.name}, by the compiler's estimate for a core"
    else:
        cpu_devices.make(values.devices)
        mesh = Mesh(np.array(jax.devices()), (_AXIS,))
        rows, command = (measure(mesh, *size, values.rounds), f"{command} --rounds={values.rounds}")
        where = f"{mesh.size} simulated devices, {processor()}, {num_cores()} core(s)"
    text = (
        f"Time to sum the gradients of a BERT with {size[0]} layers of width {size[1]}, "
        f"{bert.num_values(*size) / 1e6:.1f} M values in {len(bert.leaf_shapes(*size))} arrays, "
        f"over {where}; jax {jax.__version__}.\n"
        f"Command: `python -m experiments.bench.exchange {command}`\n\n{table(rows)}"
    )
    print(text, end="")
    if values.write:
        name = f"exchange_{values.topology}.md" if values.topology else "exchange.md"
        pathlib.Path(__file__).with_name(name).write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("layers", 6, "Transformer layers.", lower_bound=1)
    flags.DEFINE_integer("width", 512, "Width of the hidden layers.", lower_bound=2)
    flags.DEFINE_integer(
        "rounds", 7, "Rounds; each contender takes one turn per round.", lower_bound=1
    )
    flags.DEFINE_integer("devices", 8, "Simulated devices.", lower_bound=2)
    flags.DEFINE_string("topology", None, "A TPU slice to compile for, such as v3-8.")
    flags.DEFINE_bool("write", False, "Whether to write exchange.md beside this file.")
    cli.run_main(main)
