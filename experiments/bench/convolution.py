"""Time of a convolution on a CPU: JAX's, and ours, which is written in forms that XLA runs fast.

  python -m experiments.bench.convolution --write

Times the gradients of single layers, at the sizes that networks use, in float32: alone, and inside a
loop, as for a batch that is split into microbatches. The compiler options are those of a run. The two
implementations alternate in one process, so that other load affects them equally. Read the ratios, not the
milliseconds.
"""

import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from lamb_tpu import cli
from lamb_tpu.cluster.host import num_cores, processor
from lamb_tpu.kernels.convolution import convolve
from lamb_tpu.parallel.compiling import compiler_options


class Layer(NamedTuple):
    """A convolution and the size of its input."""

    name: str
    pixels: int
    channels: int
    outputs: int
    kernel: int
    stride: int
    depthwise: bool = False


LAYERS = (
    Layer("LeNet-5, first", 28, 1, 6, 5, 1),
    Layer("LeNet, second", 14, 32, 64, 5, 1),
    Layer("DavidNet, second", 32, 64, 128, 3, 1),
    Layer("ResNet-50, 3x3 of stage 2", 9, 128, 128, 3, 1),
    Layer("ResNet-50, 1x1 of stage 1", 18, 64, 256, 1, 1),
    Layer("ResNet-18, 3x3 of stage 4", 2, 512, 512, 3, 1),
    Layer(
        name="EfficientNet-B0, depthwise of stage 2",
        pixels=36,
        channels=96,
        outputs=96,
        kernel=3,
        stride=2,
        depthwise=True,
    ),
    Layer(
        name="EfficientNet-B0, depthwise of stage 6",
        pixels=3,
        channels=1152,
        outputs=1152,
        kernel=5,
        stride=1,
        depthwise=True,
    ),
)


def gradients(
    convolution: Callable[..., jax.Array], layer: Layer, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the sum of squared outputs with respect to input and kernel."""

    def value(x: jax.Array, kernel: jax.Array) -> jax.Array:
        groups = layer.channels if layer.depthwise else 1
        y = convolution(
            x,
            kernel,
            (layer.stride, layer.stride),
            "SAME",
            dimension_numbers=lax.conv_dimension_numbers(
                x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC")
            ),
            feature_group_count=groups,
        )
        return jnp.sum(y * y)

    return jax.grad(value, (0, 1))(x, kernel)


def in_a_loop(
    function: Callable[..., Any], x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients with respect to kernel and input, from a loop over one microbatch."""

    def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_x, of_kernel = function(x, kernel)
        return total + of_kernel, of_x

    return lax.scan(body, jnp.zeros_like(kernel), x[None])


def measure(layer: Layer, batch: int, rounds: int) -> dict[tuple[str, bool], float]:
    """Returns the median seconds by (implementation, whether in a loop)."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (batch, layer.pixels, layer.pixels, layer.channels))
    inputs = 1 if layer.depthwise else layer.channels
    kernel = jax.random.normal(keys[1], (layer.kernel, layer.kernel, inputs, layer.outputs))
    functions = {}
    options = compiler_options(jax.make_mesh((1,), ("data",)))
    for whose, convolution in (("jax", lax.conv_general_dilated), ("ours", convolve)):
        function = functools.partial(gradients, convolution, layer)
        for loop in (False, True):
            timed = functools.partial(in_a_loop, function) if loop else function
            functions[whose, loop] = (
                jax.jit(timed, compiler_options=options).lower(x, kernel).compile()
            )
    seconds: dict[tuple[str, bool], list[float]] = {key: [] for key in functions}
    for _ in range(rounds + 1):
        for key, compiled in functions.items():
            begun = time.perf_counter()
            jax.block_until_ready(compiled(x, kernel))
            seconds[key].append(time.perf_counter() - begun)
    return {key: statistics.median(times[1:]) for key, times in seconds.items()}


def table(measured: dict[Layer, dict[tuple[str, bool], float]]) -> str:
    """Returns the measurements as Markdown."""
    lines = [
        "| layer | pixels | alone: JAX's, ms | ours, ms | ratio | in a loop: JAX's, ms | ours, ms "
        "| ratio |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for layer, seconds in measured.items():
        cells = []
        for loop in (False, True):
            theirs, ours = (1e3 * seconds[whose, loop] for whose in ("jax", "ours"))
            cells += [f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2g}"]
        shape = f"{layer.kernel}x{layer.kernel}, {layer.channels} to {layer.outputs} channels"
        lines.append(
            f"| {layer.name}: {shape}, stride {layer.stride} | {layer.pixels} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints the table, and writes it if --write is given."""
    values = flags.FLAGS
    measured = {layer: measure(layer, values.batch, values.rounds) for layer in LAYERS}
    command = f"--batch={values.batch} --rounds={values.rounds}"
    text = (
        f"Time of the gradients of one layer, batch {values.batch}, float32: jax "
        f"{jax.__version__}, "
        f"{processor()}, {num_cores()} core(s). Medians of {values.rounds} calls. The ratio is our "
        "time divided by JAX's. `in a loop`: inside a loop of one iteration, as over microbatches.\n"
        f"Command: `python -m experiments.bench.convolution {command}`\n\n{table(measured)}"
    )
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("batch", 25, "Images.", lower_bound=1)
    flags.DEFINE_integer(
        "rounds", 3, "Rounds; each contender takes one turn per round.", lower_bound=1
    )
    flags.DEFINE_bool("write", False, "Whether to write convolution.md beside this file.")
    cli.run_main(main)
