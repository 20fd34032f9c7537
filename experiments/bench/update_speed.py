"""Time of the optimizer update for BERT-Large: ours, Optax's, timm's and PyTorch's.

  python -m experiments.bench.update_speed --write

Times `tx.update` and `optax.apply_updates` together, jitted, with donated buffers, in float32. Also
times the steps of timm's Lamb and PyTorch's AdamW; the extra `bench` installs PyTorch and timm. The
contenders alternate in one process, so that other load affects all of them. In each turn, a contender
allocates new buffers and frees them. Read the ratios, not the milliseconds.
"""

import functools
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

from experiments.bench import bert, peers
from experiments.bench.bert import STACKED, Target
from lamb_tpu import cli, optim

_WARM, _TIMED = 1, 3  # untimed and timed updates in a call of `iterate`


class Contender(NamedTuple):
    """A row of the table."""

    iterate: (
        Callable[[], list[float]] | None
    )  # returns seconds per timed update; None if not installed
    moved: float | None = (
        None  # bytes that XLA's cost analysis counts as moved, relative to the minimum
    )
    temporary: float | None = None  # temporary bytes, relative to the parameters


def optax_contender(
    tx: optax.GradientTransformation, words: int, num_layers: int, width: int, stacked: bool = False
) -> Contender:
    """Returns an Optax contender; `words` is the minimum number of float32 words moved per parameter."""
    compiled = bert.compile_update(tx, num_layers, width, stacked)
    size = 4 * bert.num_values(num_layers, width)

    def iterate():
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
        iterate,
        compiled.cost_analysis()["bytes accessed"] / (words * size),
        compiled.memory_analysis().temp_size_in_bytes / size,
    )


def torch_contender(num_layers: int, width: int, make: Callable[[Any, Any, Any], Any]) -> Contender:
    """Returns a contender that runs under PyTorch, on JAX's platform.

    Args:
      num_layers, width: size of the network.
      make: called with torch, timm.optim and the parameters; returns the optimizer.
    """
    try:
        torch, timm = importlib.import_module("torch"), importlib.import_module("timm.optim")
    except ImportError:
        return Contender(None)
    torch.set_num_threads(os.cpu_count())
    device = torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")

    def iterate():
        params = []
        for value, grad in zip(
            *(_values(bert.leaf_shapes(num_layers, width)) for _ in range(2)), strict=True
        ):
            params.append(torch.nn.Parameter(torch.tensor(value, device=device)))
            params[-1].grad = torch.tensor(grad, device=device)
        optimizer = make(torch, timm, params)

        def update():
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return _times(update)

    return Contender(iterate)


def _lamb(foreach: bool) -> Callable[[Any, Any, Any], Any]:
    """Returns a maker of timm's Lamb as in the LAMB paper's Algorithm 2: no clipping, no exempt leaves."""
    return lambda torch, timm, params: peers.lamb(
        timm, params, foreach, lr=1e-3, weight_decay=0.01, max_grad_norm=None
    )


def _adamw(torch: Any, timm: Any, params: Any) -> Any:
    del timm
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)


def makers(num_layers: int, width: int) -> dict[str, Callable[[], Contender]]:
    """Maps each row's name to a function that compiles the row's contender."""
    size = num_layers, width

    def ours(tx: optax.GradientTransformation, words: int, stacked: bool = False) -> Any:
        return functools.partial(optax_contender, tx, words, *size, stacked)

    def theirs(make: Callable[[Any, Any, Any], Any]) -> Any:
        return functools.partial(torch_contender, *size, make)

    return {
        "optax.adamw": ours(optax.adamw(1e-3, weight_decay=0.01), 7),
        "optax.lamb": ours(optax.lamb(1e-3, weight_decay=0.01), 10),
        "torch AdamW, fused": theirs(_adamw),
        "timm Lamb": theirs(_lamb(foreach=False)),
        "timm Lamb, foreach": theirs(_lamb(foreach=True)),
        "lamb": ours(optim.lamb(1e-3), 10),
        "lamb, stacked layers": ours(optim.lamb(1e-3, rules=STACKED), 10, stacked=True),
    }


def contenders(num_layers: int, width: int) -> dict[str, Contender]:
    """Compiles every contender, and returns the contenders by the names of their rows."""
    return {name: make() for name, make in makers(num_layers, width).items()}


def table(
    rows: dict[str, Contender], seconds: dict[str, list[float]], num_layers: int, width: int
) -> str:
    """Returns the measurements as Markdown."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    leaves = [len(bert.leaf_shapes(num_layers, width, stacked)) for stacked in (False, True)]
    torch = "PyTorch not installed"
    if "timm Lamb" in seconds:
        versions = [importlib.import_module(name).__version__ for name in ("torch", "timm")]
        torch = "PyTorch {}, timm {}".format(*versions)
    lines = [
        f"Optimizer update of {bert.num_values(num_layers, width) / 1e6:.1f} M float32 parameters in "
        f"{leaves[0]} leaves, or {leaves[1]} with stacked layers: jax {jax.__version__}, optax "
        f"{optax.__version__}, {torch}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores. "
        f"Medians of {len(seconds['lamb'])} updates; the ratios compare medians. `moved`: the bytes "
        f"read and written by XLA's count, divided by the minimum, which is 10 words of 4 bytes per "
        f"parameter "
        f"for LAMB and 7 words for AdamW. `temporary`: temporary memory, relative to the parameters' bytes.",
        "",
        "| update | ms | fastest ms | time / optax.lamb | time / optax.adamw | moved | temporary |",
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
    """Returns the targets for the update's time on a CPU."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    passes = (
        "XLA's CPU compiler makes a separate pass for each output and each norm, which moves 14 "
        "words per parameter instead of 10"
    )
    partial = "partial sums, one per 8 or 16 values, are stored until the norms are computed"
    return [
        target
        for name in ("lamb", "lamb, stacked layers")
        for target in (
            Target(
                name, "time / optax.lamb", 0.6, medians[name] / medians["optax.lamb"], 2, passes
            ),
            Target(
                name, "time / optax.adamw", 2.0, medians[name] / medians["optax.adamw"], 2, passes
            ),
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
    """Returns arrays that repeat a million normal numbers; drawing all numbers would be slow."""
    numbers = 0.02 * np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)
    return jax.tree.map(
        lambda shape: np.resize(numbers, shape), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


def main() -> None:
    """Measures, prints the tables, and writes them if --write is given."""
    values = flags.FLAGS
    rows = contenders(values.layers, values.width)
    seconds = {name: [] for name, row in rows.items() if row.iterate}
    for _ in range(values.rounds):
        for name, times in seconds.items():
            times += rows[name].iterate()
    text = table(rows, seconds, values.layers, values.width)
    text += "\n" + bert.target_table(targets(rows, seconds))
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer(
        "rounds", 4, "Rounds; each contender makes 3 timed updates per round.", lower_bound=1
    )
    flags.DEFINE_integer("layers", 24, "Transformer layers.", lower_bound=1)
    flags.DEFINE_integer("width", 1024, "Width of the hidden layers.", lower_bound=2)
    flags.DEFINE_bool("write", False, "Whether to write update_speed.md beside this file.")
    cli.run_main(main)
