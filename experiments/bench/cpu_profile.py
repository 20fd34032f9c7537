"""Time of an update on a CPU, by type of operation.

  python -m experiments.bench.cpu_profile --networks=LeNet

A network can be slower here than in PyTorch for these reasons. XLA's convolutions support only
channels-last arrays and one group, so a kernel's gradient needs transposed copies of the input and of
the output's gradient. PyTorch's library, oneDNN, has routines for gradients and for depthwise
convolutions, and keeps one array layout from layer to layer. PyTorch fuses BatchNorm and ReLU into few
passes over the images, whereas XLA makes a separate pass for each mean, variance, normalisation and
gradient (element-wise operations and sums). XLA's convolutions with few input channels, as in LeNet-5,
fill vector registers badly. BERT consists almost only of matrix products, and takes equally long in
both libraries.
"""

import gzip
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
from absl import flags

from experiments.bench.step_networks import NETWORKS
from experiments.bench.step_update import ours
from lamb_tpu import cli

# Patterns of the names of XLA's operations. Operations that match no pattern are element-wise.
_TYPES = {
    "convolutions": re.compile(r"conv(olution|_general)"),
    "products and sums": re.compile(r"ynn_|dot"),
    "copies": re.compile(r".*(copy|transpose|concatenate)"),
}
TYPES = (*_TYPES, "element-wise")


def kind_of(operation: str) -> str:
    """Returns the type of an operation.

    >>> kind_of("transpose_copy_fusion.3"), kind_of("ynn_fusion.2"), kind_of("multiply_fusion")
    ('copies', 'products and sums', 'element-wise')
    """
    fits = (kind for kind, names in _TYPES.items() if names.match(operation))
    return next(fits, "element-wise")


def profile(update: Callable[[], None]) -> tuple[float, dict[str, float]]:
    """Returns the seconds of an update, and the seconds of its operations by type.

    XLA dispatches a convolution to Eigen's threads and continues, so the profile hardly shows the
    convolution's time. Time that no operation accounts for is therefore attributed to convolutions.
    Operations that run in parallel each count in full.
    """
    update()
    update()
    began = time.perf_counter()
    update()
    total = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            update()
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    seconds = dict.fromkeys(TYPES, 0.0)
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            seconds[kind_of(event["args"]["hlo_op"])] += event["dur"] / 1e6
    others = sum(seconds.values()) - seconds["convolutions"]
    seconds["convolutions"] = max(seconds["convolutions"], total - others)
    return total, seconds


def lines(names: Sequence[str]) -> list[str]:
    """Returns a table of milliseconds by type of operation."""
    table = [
        f"| network, ms by operation | {' | '.join(TYPES)} | update, ms |",
        f"|---|{'--:|' * (len(TYPES) + 1)}",
    ]
    for name in names:
        total, seconds = profile(ours(NETWORKS[name]))
        cells = " | ".join(f"{1e3 * seconds[kind]:,.0f}" for kind in TYPES)
        table.append(f"| {name} | {cells} | {1e3 * total:,.0f} |")
    return table


def main() -> None:
    """Prints the table."""
    jax.config.update("jax_platforms", "cpu")
    print("\n".join(lines(flags.FLAGS.networks or list(NETWORKS))))


if __name__ == "__main__":
    flags.DEFINE_multi_enum("networks", [], list(NETWORKS), "Networks to profile (default: all).")
    cli.run_main(main)
