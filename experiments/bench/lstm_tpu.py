"""Time of the large Penn Treebank network's update by the TPU compiler: our LSTM's and Flax's.

  python -m experiments.bench.lstm_tpu --write

No TPU is needed: the compiler is a library. It compiles an embedding, two layers of 1,500 cells, a
softmax over 10,000 words, the gradient of the loss and SGD, for a batch of 20 and of 160 windows of
35 words, on one core of a TPU v3, and estimates the time. The networks differ in the layers alone,
those of `experiments.bench.lstm`.
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
    """A language model, the layers of which are a module of their own."""

    layers: nn.Module
    features: int
    words: int

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Logits (steps, batch, words) of words (steps, batch)."""
        inputs = nn.Embed(self.words, self.features)(words)
        return nn.Dense(self.words)(self.layers(inputs))


def milliseconds(name: str, batch: int, features: int, words: int) -> float:
    """Returns the compiler's estimate of an update."""
    network = Network(LAYERS[name](features, LARGE.layers), features, words)
    place = SingleDeviceSharding(topology.devices(SLICE)[0])
    text = jax.ShapeDtypeStruct((LARGE.steps, batch), jnp.int32, sharding=place)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
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
        f"An update of {LARGE.layers} x {features} cells and {words:,} words, {LARGE.steps} steps: "
        f"jax {jax.__version__}, flax {flax.__version__}, libtpu "
        f"{importlib.metadata.version('libtpu')}. The compiler's estimates for one core of a TPU "
        "v3; nothing was run. A ratio below 1 is ours ahead.",
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
    """Compiles, prints the table and writes it if asked."""
    text = table(flags.FLAGS.features, flags.FLAGS.words)
    print(text, end="")
    if flags.FLAGS.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("features", LARGE.features, "Cells of a layer.", lower_bound=1)
    flags.DEFINE_integer("words", WORDS, "Of the vocabulary.", lower_bound=2)
    flags.DEFINE_bool("write", False, "Whether to write lstm_tpu.md beside this file.")
    cli.run_main(main)
