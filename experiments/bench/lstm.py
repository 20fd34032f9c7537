"""Time of LSTM layers on a CPU, forward and backward: ours, Flax's and PyTorch's.

  python -m experiments.bench.lstm --write

Times the gradients of the sum of squared outputs with respect to weights and inputs, in float32,
without dropout, at the sizes of the LEGW paper's applications. Flax's layer is nn.RNN with
OptimizedLSTMCell; PyTorch's is nn.LSTM (the extra `bench` installs PyTorch). The contenders alternate
in one process, so that other load affects all of them. Read the ratios, not the milliseconds. In its
turn, a contender makes one untimed call and then several timed calls, because PyTorch's threads spin
for a while after PyTorch's turn, and caches hold the arrays of the previous contender. A fourth
contender computes little more than the matrix products of our layers, with the same compiler options;
the difference from our time is the cost of everything else.
"""

import functools
import importlib
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import flags

from lamb_tpu import cli
from lamb_tpu.cluster.host import num_cores, processor
from lamb_tpu.kernels.recurrence import GATES
from lamb_tpu.models.lstm import LSTM
from lamb_tpu.parallel.compiling import compiler_options


class Size(NamedTuple):
    """Stacked LSTM layers and the size of their input."""

    name: str
    steps: int
    batch: int
    inputs: int
    features: int
    layers: int


SIZES = (
    Size("MNIST row by row", 28, 128, 28, 128, 1),
    Size("PTB small", 20, 20, 200, 200, 2),
    Size("PTB large", 35, 20, 1500, 1500, 2),
)
Iteration = Callable[[], Any]
_CALLS = 8  # timed calls in a contender's turn


class Ours(nn.Module):
    """Layers of `lamb_tpu.models.lstm`."""

    features: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x, _ = LSTM(self.features)(x)
        return x


class Flax(nn.Module):
    """Layers of Flax."""

    features: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.features), time_major=True)(x)
        return x


def of_jax(module: nn.Module, size: Size) -> Iteration:
    """Returns a function that computes a Linen module's gradients, compiled with the options of a run."""
    x = jax.random.normal(jax.random.key(0), (size.steps, size.batch, size.inputs))
    variables = module.init(jax.random.key(1), x)

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(module.apply(variables, x)))

    return _compiled(gradients, variables, x)


def of_products(size: Size) -> Iteration:
    """Returns a function that computes only our layers' matrix products, forward and backward."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * size.layers))
    rows, width = (size.steps, size.batch), GATES * size.features
    layers = []
    for layer in range(size.layers):
        inputs = size.features if layer else size.inputs
        shapes = (*rows, inputs), (*rows, size.features), (inputs, width), (size.features, width)
        layers.append([jax.random.normal(next(keys), shape) for shape in shapes])

    def recurrent(first: jax.Array, kernel: jax.Array) -> jax.Array:
        # Add a value of each product to the next input, so that XLA cannot merge or reorder the steps.
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + jnp.dot(x, kernel)[:1, :1], None

        return jax.lax.scan(step, first, length=size.steps)[0]

    def products(layers: list[list[jax.Array]]) -> list[jax.Array]:
        done: list[jax.Array] = []
        for x, outputs, of_inputs, of_hidden in layers:
            gates = jnp.dot(x, of_inputs)
            done += recurrent(outputs[0], of_hidden), recurrent(gates[0], of_hidden.T)
            done.append(jnp.dot(gates, of_inputs.T))
            for factor in (x, outputs):
                done.append(jax.lax.dot_general(factor, gates, (((0, 1), (0, 1)), ((), ()))))
        return done

    return _compiled(products, layers)


def _compiled(function: Callable[..., Any], *arguments: Any) -> Iteration:
    options = compiler_options(jax.make_mesh((1,), ("data",)))
    compiled = jax.jit(function, compiler_options=options).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def of_torch(size: Size) -> Iteration | None:
    """Returns a function that computes the gradients of PyTorch's nn.LSTM; None without PyTorch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(num_cores())
    layers = torch.nn.LSTM(size.inputs, size.features, size.layers)
    x = torch.randn(size.steps, size.batch, size.inputs, requires_grad=True)

    def iterate() -> None:
        layers.zero_grad()
        x.grad = None
        outputs, _ = layers(x)
        outputs.square().sum().backward()

    return iterate


def measure(size: Size, rounds: int) -> dict[str, float]:
    """Returns the median seconds of each installed contender."""
    iterations = {
        "ours": of_jax(Ours(size.features, size.layers), size),
        "flax": of_jax(Flax(size.features, size.layers), size),
        "torch": of_torch(size),
        "products": of_products(size),
    }
    seconds: dict[str, list[float]] = {name: [] for name, iterate in iterations.items() if iterate}
    for _ in range(rounds):
        for name, times in seconds.items():
            iterate = iterations[name]
            assert iterate is not None
            iterate()
            begun = time.perf_counter()
            for _ in range(_CALLS):
                iterate()
            times.append((time.perf_counter() - begun) / _CALLS)
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(measured: dict[Size, dict[str, float]]) -> str:
    """Returns the measurements as Markdown."""
    lines = [
        "| size | steps, batch, layers x features | ours, ms | our matrix products alone, ms | Flax's, ms | "
        "PyTorch's, ms | ours / Flax's | ours / PyTorch's |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for size, seconds in measured.items():
        ours = seconds["ours"]
        shown = [
            f"{1e3 * seconds[name]:.2f}" if name in seconds else "not installed"
            for name in ("ours", "products", "flax", "torch")
        ]
        ratios = [
            f"{ours / seconds[name]:.2f}" if name in seconds else "-" for name in ("flax", "torch")
        ]
        lines.append(
            f"| {size.name} | {size.steps}, {size.batch}, {size.layers} x {size.features} | "
            f"{' | '.join([*shown, *ratios])} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints the table, and writes it if --write is given."""
    values = flags.FLAGS
    sizes = [size for size in SIZES if size.features <= values.most_features]
    measured = {size: measure(size, values.rounds) for size in sizes}
    torch = "PyTorch not installed"
    if any("torch" in seconds for seconds in measured.values()):
        torch = f"PyTorch {importlib.import_module('torch').__version__}"
    command = f"--rounds={values.rounds}"
    text = (
        f"Time of the gradients of LSTM layers with respect to weights and inputs, in float32: "
        f"jax {jax.__version__}, flax {flax.__version__}, {torch}, {processor()}, {num_cores()} core(s). "
        f"Medians of {values.rounds} rounds. A ratio below 1 means that our layers are faster.\n"
        f"Command: `python -m experiments.bench.lstm {command}`\n\n{table(measured)}"
    )
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer(
        "rounds", 9, "Rounds; each contender takes one turn per round.", lower_bound=1
    )
    flags.DEFINE_integer("most_features", 1500, "Skip layers with more features.", lower_bound=128)
    flags.DEFINE_bool("write", False, "Whether to write lstm.md beside this file.")
    cli.run_main(main)
