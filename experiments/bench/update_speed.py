"""How long the optimizer's update takes: ours beside Optax's, on BERT-Base's parameters.

  python -m experiments.bench.update_speed --write

Times `tx.update` and `optax.apply_updates` together, jitted, buffers donated, in float32. The
contenders take turns in one process, so that what else the machine does falls on all of them; read
the ratios and not the milliseconds.
"""

import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from lamb_tpu import cli, optim

STACKED = [("^layers/", {"layer_axes": (0,)}), ("", {})]


def bert_shapes(num_layers: int = 12, width: int = 768, stacked: bool = False) -> dict:
    """The shapes of BERT-Base: 110 M parameters in 206 leaves, or 30 with stacked layers."""
    hidden, vocabulary = 4 * width, 30_522

    def dense(rows, columns):
        return {"kernel": (rows, columns), "bias": (columns,)}

    norm = {"scale": (width,), "bias": (width,)}
    layer = {
        **{name: dense(width, width) for name in ("query", "key", "value", "output")},
        "up": dense(width, hidden), "down": dense(hidden, width),
        "attention_norm": norm, "norm": norm,
    }
    layers = {str(i): layer for i in range(num_layers)}
    if stacked:
        layers = jax.tree.map(lambda shape: (num_layers, *shape), layer, is_leaf=_is_shape)
    return {
        "word": (vocabulary, width), "position": (512, width), "type": (2, width),
        "embedding_norm": norm, "layers": layers, "pooler": dense(width, width),
        "masked_lm": {"dense": dense(width, width), "norm": norm, "bias": (vocabulary,)},
        "next_sentence": dense(width, 2),
    }


def measure(num_layers: int, width: int, rounds: int) -> dict[str, tuple[list[float], float]]:
    """Seconds of each update, and GB of temporary memory, by contender."""
    contenders = {
        "optax.adamw": (optax.adamw(1e-3, weight_decay=0.01), False),
        "optax.lamb": (optax.lamb(1e-3, weight_decay=0.01), False),
        "lamb": (optim.lamb(1e-3), False),
        "lamb, stacked layers": (optim.lamb(1e-3, rules=STACKED), True),
    }
    compiled = {}
    for name, (tx, stacked) in contenders.items():
        shapes = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            bert_shapes(num_layers, width, stacked), is_leaf=_is_shape,
        )

        def update(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.jit(update, donate_argnums=(0, 1))
        compiled[name] = step.lower(shapes, jax.eval_shape(tx.init, shapes), shapes).compile()
    seconds = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (tx, stacked) in contenders.items():
            params, grads = _values(num_layers, width, stacked), _values(num_layers, width, stacked)
            state = jax.block_until_ready(tx.init(params))
            for timed in (False, True, True, True):
                start = time.perf_counter()
                params, state = jax.block_until_ready(compiled[name](params, state, grads))
                if timed:
                    seconds[name].append(time.perf_counter() - start)
    return {
        name: (seconds[name], compiled[name].memory_analysis().temp_size_in_bytes / 1e9)
        for name in contenders
    }


def table(measured: dict[str, tuple[list[float], float]], num_values: int) -> str:
    """The measurements as Markdown."""
    medians = {name: statistics.median(seconds) for name, (seconds, _) in measured.items()}
    lines = [
        f"Update of {num_values / 1e6:.1f} M float32 parameters: jax {jax.__version__}, optax "
        f"{optax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores. Medians of "
        f"{len(next(iter(measured.values()))[0])}; the ratios compare medians.",
        "",
        "| update | ms | fastest ms | of optax.lamb | of optax.adamw | temporary GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, (seconds, temporary) in measured.items():
        lines.append(
            f"| {name} | {1e3 * medians[name]:.0f} | {1e3 * min(seconds):.0f} | "
            f"{medians[name] / medians['optax.lamb']:.2f} | "
            f"{medians[name] / medians['optax.adamw']:.2f} | {temporary:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _values(num_layers: int, width: int, stacked: bool) -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(0.02 * rng.standard_normal(shape, dtype=np.float32)),
        bert_shapes(num_layers, width, stacked), is_leaf=_is_shape,
    )


def _is_shape(value) -> bool:
    return isinstance(value, tuple)


def main() -> None:
    """Measures, prints the table and writes it if asked."""
    layers, width = flags.FLAGS.layers, flags.FLAGS.width
    shapes = jax.tree.leaves(bert_shapes(layers, width), is_leaf=_is_shape)
    text = table(
        measure(layers, width, flags.FLAGS.rounds), sum(int(np.prod(shape)) for shape in shapes)
    )
    print(text, end="")
    if flags.FLAGS.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 4, "Turns of each, of 3 timed updates.", lower_bound=1)
    flags.DEFINE_integer("layers", 12, "Transformer layers.", lower_bound=1)
    flags.DEFINE_integer("width", 768, "Of the hidden layer.", lower_bound=2)
    flags.DEFINE_bool("write", False, "Whether to write update_speed.md beside this file.")
    cli.run_main(main)
