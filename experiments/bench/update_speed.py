"""Time of the optimizer's update, ours beside Optax's and timm's, for BERT-Large.

  python -m experiments.bench.update_speed --write

Times `tx.update` and `optax.apply_updates` together, jitted, buffers donated, in float32, and the
step of timm's Lamb under PyTorch, which the extra `bench` installs. The contenders take turns in
one process, each with fresh buffers that it gives back, so that what else the machine does falls on
all of them; read the ratios and not the milliseconds.
"""

import importlib
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from experiments.bench import bert
from experiments.bench.bert import STACKED, Target
from lamb_tpu import cli, optim

_WARM, _TIMED = 1, 3  # updates in a turn


class Contender(NamedTuple):
    """One row."""

    turn: Callable[[], list[float]] | None  # seconds of each timed update; None: not installed
    moved: float | None = None  # bytes over the least possible, as XLA counts them
    temporary: float | None = None  # bytes over those of the parameters


def optax_contender(
    tx: optax.GradientTransformation, words: int, num_layers: int, width: int, stacked: bool = False
) -> Contender:
    """An Optax transformation; `words` is the least to read and write for a parameter."""
    compiled = bert.compile_update(tx, num_layers, width, stacked)
    size = 4 * bert.num_values(num_layers, width)

    def turn():
        params, grads = (
            jax.tree.map(jnp.array, _values(bert.bert_shapes(num_layers, width, stacked)))
            for _ in range(2)
        )
        state = jax.block_until_ready(tx.init(params))

        def update():
            nonlocal params, state
            params, state = jax.block_until_ready(compiled(params, state, grads))

        return _times(update)

    return Contender(
        turn,
        compiled.cost_analysis()["bytes accessed"] / (words * size),
        compiled.memory_analysis().temp_size_in_bytes / size,
    )


def timm_contender(num_layers: int, width: int, foreach: bool) -> Contender:
    """timm's Lamb as in Algorithm 2: every leaf decays and adapts, gradients are not clipped."""
    try:
        torch, timm = importlib.import_module("torch"), importlib.import_module("timm.optim")
    except ImportError:
        return Contender(None)
    torch.set_num_threads(os.cpu_count())

    def turn():
        params = []
        for value, grad in zip(
            *(_values(bert.leaf_shapes(num_layers, width)) for _ in range(2)), strict=True
        ):
            params.append(torch.nn.Parameter(torch.tensor(value)))
            params[-1].grad = torch.tensor(grad)
        optimizer = timm.Lamb(
            params, lr=1e-3, weight_decay=0.01, max_grad_norm=None, foreach=foreach
        )
        return _times(optimizer.step)

    return Contender(turn)


def contenders(num_layers: int, width: int) -> dict[str, Contender]:
    """Every row, compiled."""
    size = num_layers, width
    return {
        "optax.adamw": optax_contender(optax.adamw(1e-3, weight_decay=0.01), 7, *size),
        "optax.lamb": optax_contender(optax.lamb(1e-3, weight_decay=0.01), 10, *size),
        "timm Lamb": timm_contender(*size, foreach=False),
        "timm Lamb, foreach": timm_contender(*size, foreach=True),
        "lamb": optax_contender(optim.lamb(1e-3), 10, *size),
        "lamb, stacked layers": optax_contender(
            optim.lamb(1e-3, rules=STACKED), 10, *size, stacked=True
        ),
    }


def table(
    rows: dict[str, Contender], seconds: dict[str, list[float]], num_layers: int, width: int
) -> str:
    """The measurements as Markdown."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    leaves = [len(bert.leaf_shapes(num_layers, width, stacked)) for stacked in (False, True)]
    torch = "PyTorch not installed"
    if "timm Lamb" in seconds:
        versions = [importlib.import_module(name).__version__ for name in ("torch", "timm")]
        torch = "PyTorch {}, timm {}".format(*versions)
    lines = [
        f"Update of {bert.num_values(num_layers, width) / 1e6:.1f} M float32 parameters, "
        f"{leaves[0]} leaves, {leaves[1]} with stacked layers: jax {jax.__version__}, optax "
        f"{optax.__version__}, {torch}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores. "
        f"Medians of {len(seconds['lamb'])}; the ratios compare medians. Moved: bytes by XLA's "
        f"count over the least possible, 10 words a parameter for LAMB and 7 for AdamW. Temporary: "
        f"of the parameters' size.",
        "",
        "| update | ms | fastest ms | of optax.lamb | of optax.adamw | moved | temporary |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if name not in seconds:
            lines.append(f"| {name} | not installed | | | | | |")
            continue
        known = row.moved is not None
        lines.append(
            f"| {name} | {1e3 * medians[name]:.0f} | {1e3 * min(seconds[name]):.0f} | "
            f"{medians[name] / medians['optax.lamb']:.2f} | "
            f"{medians[name] / medians['optax.adamw']:.2f} | "
            f"{f'{row.moved:.2f}' if known else '-'} | "
            f"{f'{100 * row.temporary:.1f} %' if known else '-'} |"
        )
    return "\n".join(lines) + "\n"


def targets(rows: dict[str, Contender], seconds: dict[str, list[float]]) -> list[Target]:
    """Returns the targets of the update's time on a CPU."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    passes = (
        "XLA's CPU compiler gives each output and each norm a pass of its own: 14 words a "
        "parameter are moved, not 10"
    )
    partial = "partial sums, one for 8 or 16 values, are kept until the norms are taken"
    return [
        target
        for name in ("lamb", "lamb, stacked layers")
        for target in (
            Target(name, "of optax.lamb", 0.6, medians[name] / medians["optax.lamb"], 2, passes),
            Target(name, "of optax.adamw", 2.0, medians[name] / medians["optax.adamw"], 2, passes),
            Target(name, "temporary, %", 10.0, 100 * rows[name].temporary, 1, partial),
        )
    ]


def _times(update: Callable[[], Any]) -> list[float]:
    seconds = []
    for _ in range(_WARM + _TIMED):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    return seconds[_WARM:]


def _values(shapes: Any) -> Any:
    """Arrays of the shapes: a million normal numbers over and over, which is quick to make."""
    numbers = 0.02 * np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)
    return jax.tree.map(
        lambda shape: np.resize(numbers, shape), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


def main() -> None:
    """Measures, prints the tables and writes them if asked."""
    values = flags.FLAGS
    rows = contenders(values.layers, values.width)
    seconds = {name: [] for name, row in rows.items() if row.turn}
    for _ in range(values.rounds):
        for name, times in seconds.items():
            times += rows[name].turn()
    text = table(rows, seconds, values.layers, values.width)
    text += "\n" + bert.target_table(targets(rows, seconds))
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 4, "Turns of each, of 3 timed updates.", lower_bound=1)
    flags.DEFINE_integer("layers", 24, "Transformer layers.", lower_bound=1)
    flags.DEFINE_integer("width", 1024, "Of the hidden layer.", lower_bound=2)
    flags.DEFINE_bool("write", False, "Whether to write update_speed.md beside this file.")
    cli.run_main(main)
