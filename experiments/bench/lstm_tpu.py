"""The TPU compiler's estimate for an update of the large Penn Treebank network: our LSTM and Flax's.

  python -m experiments.bench.lstm_tpu --write

No TPU is needed: the compiler is a library. It compiles an update with SGD for one core of a TPU v3,
and estimates its time. The network has an embedding, two layers of 1,500 cells and a softmax over
10,000 words; batches have 20 and 160 windows of 35 words. The LSTM layers are those of
`experiments.bench.lstm`.
"""

import importlib.metadata
import pathlib
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from absl import flags
from jax.sharding import SingleDeviceSharding

from experiments.bench.lstm import SIZES, Flax, Ours
from lamb_tpu import cli
from lamb_tpu.cost import topology
from lamb_tpu.cost.hlo import program_cost

SLICE = topology.topology("v3-8")
LARGE = SIZES[-1]
WORDS = 10_000
BATCHES = (20, 160)
LAYERS = {"ours": Ours, "Flax's": Flax}


class Network(nn.Module):
    """A language model whose recurrent layers are a given module."""

    layers: nn.Module
    features: int
    words: int

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Returns logits (steps, batch, words) for words (steps, batch)."""
        inputs = nn.Embed(self.words, self.features)(words)
        return nn.Dense(self.words)(self.layers(inputs))


def milliseconds(name: str, batch: int, features: int, words: int) -> float:
    """Returns the compiler's estimate for an update."""
    network = Network(LAYERS[name](features, LARGE.layers), features, words)
    sharding = SingleDeviceSharding(topology.devices(SLICE)[0])
    text = jax.ShapeDtypeStruct((LARGE.steps, batch), jnp.int32, sharding=sharding)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(network.init, jax.random.key(0), text),
    )

    def update(params: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = network.apply(params, inputs)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    compiled = jax.jit(update, donate_argnums=0).lower(params, text, text).compile()
    return 1e3 * program_cost(compiled.as_text()).cycles / SLICE.generation.clock


def table(features: int, words: int) -> str:
    """Returns the estimates as Markdown."""
    lines = [
        f"An update of an LSTM language model with {LARGE.layers} layers of {features:,} cells, "
        f"{words:,} words and {LARGE.steps} steps: jax {jax.__version__}, flax {flax.__version__}, libtpu "
        f"{importlib.metadata.version('libtpu')}. The times are the compiler's estimates for one core of a "
        "TPU v3; nothing was run. A ratio below 1 means that our LSTM is faster.",
        "Command: `python -m experiments.bench.lstm_tpu`",
        "",
        "| batch | ours, ms | Flax's, ms | ours / Flax's |",
        "|--:|--:|--:|--:|",
    ]
    for batch in BATCHES:
        ours, theirs = (milliseconds(name, batch, features, words) for name in LAYERS)
        lines.append(f"| {batch} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compiles, prints the table, and writes it if --write is given."""
    text = table(flags.FLAGS.features, flags.FLAGS.words)
    print(text, end="")
    if flags.FLAGS.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("features", LARGE.features, "Cells per layer.", lower_bound=1)
    flags.DEFINE_integer("words", WORDS, "Words in the vocabulary.", lower_bound=2)
    flags.DEFINE_bool("write", False, "Whether to write lstm_tpu.md beside this file.")
    cli.run_main(main)
