"""Times optimizer updates of BERT-Large and training steps of image networks, ours and other libraries'.

The measurements are rows of `experiments.bench.update_speed` and `experiments.bench.step`. The contenders
run one after another. Each measurement is written as soon as it is complete.
"""

import os
import statistics
import sys
from typing import Any

import jax

from experiments.accelerator import lines
from experiments.bench import bert, step, update_speed
from experiments.bench.step_networks import NETWORKS
from lamb_tpu import cli

# The most valuable measurements come first, because the part may run out of time.
_UPDATES = (
    "lamb",
    "optax.lamb",
    "torch AdamW, fused",
    "timm Lamb, foreach",
    "lamb, stacked layers",
    "optax.adamw",
)
_IMAGES = {"ResNet-50": 128, "EfficientNet-B0": 128}  # examples per batch


def measure_updates(output: lines.Lines, layers: int, width: int) -> None:
    """Times each optimizer's updates in two rounds."""
    makers = update_speed.makers(layers, width)
    for name in _UPDATES:
        label = f"update, {name}"
        if output.has(label):
            continue
        contender = makers[name]()
        if contender.iterate is None:
            output.add(label, problem="PyTorch or timm is not installed")
            continue
        times = [*contender.iterate(), *contender.iterate()]
        output.add(
            label,
            ms=round(1e3 * statistics.median(times), 3),
            fastest_ms=round(1e3 * min(times), 3),
            parameters=bert.num_values(layers, width),
            moved=contender.moved,
        )
        del contender
        jax.clear_caches()


def measure_steps(output: lines.Lines, rounds: int, small: bool) -> None:
    """Times training steps of the image networks, ours and those of timm's networks in PyTorch."""
    for name, batch in _IMAGES.items():
        label = f"step, {name}"
        if output.has(label):
            continue
        network = NETWORKS[name]._replace(batch=batch)
        if small:
            network = network._replace(batch=4, pixels=32)
        seconds = step.measure(network, rounds)
        output.add(
            label,
            batch=network.batch,
            pixels=network.pixels,
            **{form: round(1e3 * value, 3) for form, value in seconds.items()},
            unit="ms",
        )


def main(options: Any) -> None:
    """Measures the updates, then the steps."""
    output = lines.Lines(options.out, "speed")
    measure_updates(output, *((2, 128) if options.small else (24, 1024)))
    measure_steps(output, 1 if options.small else 5, options.small)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
    given = sys.argv[1:]
    del sys.argv[1:]
    cli.run_main(lambda: main(lines.parse("speed", given)))
