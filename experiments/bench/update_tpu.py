"""The TPU compiler's estimate of the optimizer update for BERT-Large: ours and Optax's.

  python -m experiments.bench.update_tpu --write

No TPU is needed: the compiler is a library. It compiles `tx.update` together with
`optax.apply_updates`, with donated buffers, in float32, for one core of a TPU v3. It estimates the
time, the bytes read and written, and the temporary memory.
"""

import importlib.metadata
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import flags

from experiments.bench import bert
from experiments.bench.bert import STACKED, Target
from lamb_tpu import cli, optim
from lamb_tpu.cost import topology
from lamb_tpu.cost.hlo import program_cost

SLICE = topology.topology("v3-8")  # the smallest slice: four chips of two cores
BYTES_PER_SECOND = 450e9  # bandwidth of one core


class Contender(NamedTuple):
    """An update to be compiled."""

    tx: optax.GradientTransformation
    stacked: bool
    words: float  # minimum number of float32 words to read and write per parameter


class Estimate(NamedTuple):
    """The compiler's figures for one update."""

    milliseconds: float
    gigabytes: float
    least: float  # minimum gigabytes
    fusions: int
    temporary: float  # MiB


# LAMB reads g, p, m and v, and writes m and v; when both norms are known, it reads p, m and v, and
# writes p. A bfloat16 first moment saves half a word in each of its three accesses. LARS reads g and p
# for its norms, then g, p and the momentum, and writes p and the momentum. AdamW reads g, p, m and v,
# and writes p, m and v.
CONTENDERS = {
    "optax.adamw": Contender(optax.adamw(1e-3, weight_decay=0.01), False, 7),
    "optax.lamb": Contender(optax.lamb(1e-3, weight_decay=0.01), False, 10),
    "lamb": Contender(optim.lamb(1e-3), False, 10),
    "lamb, BERT's rules": Contender(optim.lamb(1e-3, rules="no_bias_no_norm"), False, 10),
    "lamb, stacked layers": Contender(optim.lamb(1e-3, rules=STACKED), True, 10),
    "lamb, stacked, no bias correction": Contender(
        optim.lamb(1e-3, bias_correction="none", rules=STACKED), True, 10
    ),
    "lamb, stacked, bfloat16 mu": Contender(
        optim.lamb(1e-3, mu_dtype=jnp.bfloat16, rules=STACKED), True, 8.5
    ),
    "optax.lars": Contender(optax.lars(1e-3, weight_decay=1e-4), False, 7),
    "lars": Contender(optim.lars(1e-3), False, 7),
    "lars, stacked layers": Contender(optim.lars(1e-3, rules=STACKED), True, 7),
}


def estimate(contender: Contender, core: jax.Device, num_layers: int, width: int) -> Estimate:
    """Compiles one contender and returns its estimate."""
    compiled = bert.compile_update(contender.tx, num_layers, width, contender.stacked, core)
    cost = program_cost(compiled.as_text())
    return Estimate(
        1e3 * cost.cycles / SLICE.generation.clock,
        compiled.cost_analysis()["bytes accessed"] / 1e9,
        contender.words * 4 * bert.num_values(num_layers, width) / 1e9,
        cost.fusions,
        compiled.memory_analysis().temp_size_in_bytes / 2**20,
    )


def table(estimates: dict[str, Estimate], num_layers: int, width: int) -> str:
    """Returns the estimates as Markdown."""
    leaves = [len(bert.leaf_shapes(num_layers, width, stacked)) for stacked in (False, True)]
    lamb, adamw = estimates["optax.lamb"], estimates["optax.adamw"]
    lines = [
        f"Optimizer update of {bert.num_values(num_layers, width) / 1e6:.1f} M float32 parameters in "
        f"{leaves[0]} leaves, or {leaves[1]} with stacked layers: jax {jax.__version__}, optax "
        f"{optax.__version__}, libtpu {importlib.metadata.version('libtpu')}. The figures are "
        f"the compiler's estimates for one core of a TPU v3; nothing was run. `minimum ms`: the time "
        f"needed to move "
        f"only the bytes that the update must read and write, at {BYTES_PER_SECOND / 1e9:.0f} "
        f"GB/s.",
        "",
        "| update | ms | time / optax.lamb | time / optax.adamw | minimum ms | GB | GB / minimum | fusions | "
        "temporary MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in estimates.items():
        lines.append(
            f"| {name} | {row.milliseconds:.1f} | {row.milliseconds / lamb.milliseconds:.2f} | "
            f"{row.milliseconds / adamw.milliseconds:.2f} | "
            f"{1e12 * row.least / BYTES_PER_SECOND:.1f} | {row.gigabytes:.2f} | "
            f"{row.gigabytes / row.least:.2f} | {row.fusions} | {row.temporary:.0f} |"
        )
    return "\n".join(lines) + "\n"


def targets(estimates: dict[str, Estimate]) -> list[Target]:
    """Returns the targets: the figures of a hand-written two-pass LAMB for BERT-Large."""
    scalars = (
        "each leaf's trust ratio needs scalar operations, which the compiler does not fuse; it "
        "counts a tile of 1 KB for each scalar"
    )
    unknown = "the target was met when it was set; compare the optimized HLO of the two versions"
    limits = {
        "lamb": (33.1, 13.45),
        "lamb, BERT's rules": (33.1, 13.45),
        "lamb, stacked layers": (32.0, 13.45),
    }
    return [
        target
        for name, (milliseconds, gigabytes) in limits.items()
        for target in (
            Target(name, "ms", milliseconds, estimates[name].milliseconds, 1, unknown),
            Target(name, "GB", gigabytes, estimates[name].gigabytes, 2, scalars),
        )
    ]


def main() -> None:
    """Compiles every contender, prints the tables, and writes them if --write is given."""
    values, core = flags.FLAGS, topology.devices(SLICE)[0]
    estimates = {
        name: estimate(contender, core, values.layers, values.width)
        for name, contender in CONTENDERS.items()
    }
    text = table(estimates, values.layers, values.width)
    if (values.layers, values.width) == (24, 1024):
        text += "\n" + bert.target_table(targets(estimates))
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("layers", 24, "Transformer layers.", lower_bound=1)
    flags.DEFINE_integer("width", 1024, "Width of the hidden layers.", lower_bound=2)
    flags.DEFINE_bool("write", False, "Whether to write update_tpu.md beside this file.")
    cli.run_main(main)
