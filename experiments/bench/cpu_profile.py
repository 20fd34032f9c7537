"""Time of an update on a CPU, by kind of operation.

  python -m experiments.bench.cpu_profile --networks=LeNet

What keeps a network behind PyTorch: XLA's convolutions take channels last and groups of one only,
so a gradient of a kernel needs both of its inputs transposed (copies). PyTorch's library, oneDNN,
has kernels for gradients and for depthwise convolutions, keeps its own order of axes from layer to
layer, and does a BatchNorm with its ReLU in few passes over the images; XLA makes a pass of its own
for each of mean, variance, normalisation and their gradients (element-wise, sums). A convolution of
few input channels, as LeNet-5's, fills a vector badly in XLA's. BERT is all products, and even.
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

# Names of XLA's operations. What none fits is element-wise.
_KINDS = {
    "convolutions": re.compile(r"conv(olution|_general)"),
    "products and sums": re.compile(r"ynn_|dot"),
    "copies": re.compile(r".*(copy|transpose|concatenate)"),
}
KINDS = (*_KINDS, "element-wise")


def kind_of(operation: str) -> str:
    """Returns the kind of an operation.

    >>> kind_of("transpose_copy_fusion.3"), kind_of("ynn_fusion.2"), kind_of("multiply_fusion")
    ('copies', 'products and sums', 'element-wise')
    """
    fits = (kind for kind, names in _KINDS.items() if names.match(operation))
    return next(fits, "element-wise")


def profile(update: Callable[[], None]) -> tuple[float, dict[str, float]]:
    """Returns the seconds of an update, and those of its operations by kind.

    XLA hands a convolution to Eigen's threads and goes on, so its own time is hardly seen. It is
    taken to be what the other kinds leave of the whole, if they leave anything: operations that run
    side by side count each.
    """
    update()
    update()
    began = time.perf_counter()
    update()
    whole = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            update()
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            seconds[kind_of(event["args"]["hlo_op"])] += event["dur"] / 1e6
    others = sum(seconds.values()) - seconds["convolutions"]
    seconds["convolutions"] = max(seconds["convolutions"], whole - others)
    return whole, seconds


def lines(names: Sequence[str]) -> list[str]:
    """Returns a table: milliseconds of an update by kind, the convolutions as what is left."""
    found = [f"| network | {' | '.join(KINDS)} | update, ms |", f"|---|{'--:|' * (len(KINDS) + 1)}"]
    for name in names:
        whole, seconds = profile(ours(NETWORKS[name]))
        cells = " | ".join(f"{1e3 * seconds[kind]:,.0f}" for kind in KINDS)
        found.append(f"| {name} | {cells} | {1e3 * whole:,.0f} |")
    return found


def main() -> None:
    """Prints the table."""
    jax.config.update("jax_platforms", "cpu")
    print("\n".join(lines(flags.FLAGS.networks or list(NETWORKS))))


if __name__ == "__main__":
    flags.DEFINE_multi_enum("networks", [], list(NETWORKS), "Those to profile; default all.")
    cli.run_main(main)
