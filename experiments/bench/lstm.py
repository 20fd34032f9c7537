"""Time of LSTM layers on a CPU, forward and backward: ours, Flax's and PyTorch's.

  python -m experiments.bench.lstm --write

Times the gradients of the sum of squared outputs, for weights and inputs, in float32, without
dropout, at the sizes of the LEGW paper's applications. Flax's is nn.RNN of OptimizedLSTMCell,
PyTorch's nn.LSTM, which the extra `bench` installs. The contenders take turns in one process, so
that what else the machine does falls on all of them; read the ratios and not the milliseconds. A
turn is several calls, as in training, after one that is not timed: threads of PyTorch spin for a
while after its last call, and caches hold another's arrays. A fourth contender has the matrix
products of ours and next to nothing else, compiled alike; what ours takes beyond it is the rest.
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
from lamb_tpu.models.lstm import LSTM
from lamb_tpu.models.recurrence import GATES
from lamb_tpu.parallel.compiling import compiler_options


class Size(NamedTuple):
    """LSTM layers one above the other, and the size of their input."""

    name: str
    steps: int
    batch: int
    inputs: int
    features: int
    layers: int


SIZES = (
    Size("MNIST by rows", 28, 128, 28, 128, 1),
    Size("PTB small", 20, 20, 200, 200, 2),
    Size("PTB large", 35, 20, 1500, 1500, 2),
)
Turn = Callable[[], Any]
_CALLS = 8  # of a turn that are timed


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


def of_jax(module: nn.Module, size: Size) -> Turn:
    """Returns a turn of a Linen module, compiled with the options of a run."""
    x = jax.random.normal(jax.random.key(0), (size.steps, size.batch, size.inputs))
    variables = module.init(jax.random.key(1), x)

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(module.apply(variables, x)))

    return _compiled(gradients, variables, x)


def of_products(size: Size) -> Turn:
    """Returns a turn of the matrix products alone that forward and backward of our layers have."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * size.layers))
    rows, width = (size.steps, size.batch), GATES * size.features
    layers = []
    for layer in range(size.layers):
        inputs = size.features if layer else size.inputs
        shapes = (*rows, inputs), (*rows, size.features), (inputs, width), (size.features, width)
        layers.append([jax.random.normal(next(keys), shape) for shape in shapes])

    def recurrent(first: jax.Array, kernel: jax.Array) -> jax.Array:
        # One number of each product is added, so that a step waits for the one before.
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


def _compiled(function: Callable[..., Any], *arguments: Any) -> Turn:
    options = compiler_options(jax.make_mesh((1,), ("data",)))
    compiled = jax.jit(function, compiler_options=options).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def of_torch(size: Size) -> Turn | None:
    """Returns a turn of PyTorch's nn.LSTM; None if PyTorch is not installed."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(num_cores())
    layers = torch.nn.LSTM(size.inputs, size.features, size.layers)
    x = torch.randn(size.steps, size.batch, size.inputs, requires_grad=True)

    def turn() -> None:
        layers.zero_grad()
        x.grad = None
        outputs, _ = layers(x)
        outputs.square().sum().backward()

    return turn


def measure(size: Size, rounds: int) -> dict[str, float]:
    """Returns median seconds by contender, of those that are installed."""
    turns = {
        "ours": of_jax(Ours(size.features, size.layers), size),
        "flax": of_jax(Flax(size.features, size.layers), size),
        "torch": of_torch(size),
        "products": of_products(size),
    }
    seconds: dict[str, list[float]] = {name: [] for name, turn in turns.items() if turn}
    for _ in range(rounds):
        for name, times in seconds.items():
            turn = turns[name]
            assert turn is not None
            turn()
            begun = time.perf_counter()
            for _ in range(_CALLS):
                turn()
            times.append((time.perf_counter() - begun) / _CALLS)
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(measured: dict[Size, dict[str, float]]) -> str:
    """Returns the measurements as Markdown."""
    lines = [
        "| size | steps, batch, layers | ours, ms | its products alone, ms | Flax's, ms | "
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
    """Measures, prints the table and writes it if asked."""
    values = flags.FLAGS
    sizes = [size for size in SIZES if size.features <= values.most_features]
    measured = {size: measure(size, values.rounds) for size in sizes}
    torch = "PyTorch not installed"
    if any("torch" in seconds for seconds in measured.values()):
        torch = f"PyTorch {importlib.import_module('torch').__version__}"
    command = f"--rounds={values.rounds}"
    text = (
        f"Gradients of LSTM layers for weights and inputs, float32: jax {jax.__version__}, flax "
        f"{flax.__version__}, {torch}, {processor()}, {num_cores()} core(s). Medians of "
        f"{values.rounds} turns; a ratio below 1 is ours ahead.\n"
        f"Command: `python -m experiments.bench.lstm {command}`\n\n{table(measured)}"
    )
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 9, "Turns of each.", lower_bound=1)
    flags.DEFINE_integer("most_features", 1500, "Leaves wider layers out.", lower_bound=128)
    flags.DEFINE_bool("write", False, "Whether to write lstm.md beside this file.")
    cli.run_main(main)
