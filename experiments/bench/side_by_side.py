"""Time of one program that updates several runs, relative to one program call per run.

  python -m experiments.bench.side_by_side --write

The program contains the updates in sequence (`in turn`), loops over the runs (`jax.lax.map`), or
batches their operations (`jax.vmap`). `lamb_tpu.parallel.side_by_side` uses the sequence on a CPU and
`vmap` on an accelerator. The variants alternate, with equal states and batches, which stay on the
device. Read the ratios to `one by one`, not the milliseconds.
"""

import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import flags

from configs import digits, mnist_lenet, ptb
from lamb_tpu import cli
from lamb_tpu.parallel import side_by_side as lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.run.build import Run, prepare

_WAYS = ("one by one", "in turn", "lax.map", "vmap")


def _config(network: str) -> Any:
    if network == "mlp":
        return digits.get_config("")
    if network == "lstm":
        return ptb.get_config("smoke")
    config = mnist_lenet.get_config(f"network={network}")
    config.data.dir = flags.FLAGS.data_dir
    return config


def _looped(update: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loop over the runs, in place of `parallel.side_by_side.side_by_side`."""

    def updates(states: tuple[Any, ...], batches: tuple[Any, ...], *held: Any) -> Any:
        several = jax.lax.map(
            lambda each: update(*each, *held), (lib._stack(states), lib._stack(batches))
        )
        new, sums = (lib._unstack(tree, len(states)) for tree in several)
        return new, sums

    return updates


def _made(run: Run, way: str, runs: int) -> Callable[[Any, Any], Any]:
    """Returns one variant as `(states, batches) -> (states, sums)`."""
    if way == "one by one":
        step = run.make_train_step()

        def one_by_one(states: Any, batches: Any) -> Any:
            outputs = [step(state, batch) for state, batch in zip(states, batches, strict=True)]
            return tuple(zip(*outputs, strict=True))

        return one_by_one
    with mock.patch.object(step_lib, "is_batched", lambda mesh: way == "vmap"):
        if way != "lax.map":
            return run.make_train_step(runs=runs)
        with mock.patch.object(step_lib, "side_by_side", lambda update, batched: _looped(update)):
            return run.make_train_step(runs=runs)


def measure(network: str) -> str:
    """Returns one row of the table."""
    values = flags.FLAGS
    run, runs = prepare(_config(network), None), values.runs
    rows = np.arange(run.spec.batch_size)
    batches = tuple(run.shard_batch(run.train_set.gather(rows)) for _ in range(runs))
    made = {way: _made(run, way, runs) for way in _WAYS}
    states = {way: tuple(run.first_state() for _ in range(runs)) for way in _WAYS}
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    for number in range(values.rounds + 1):
        for way in _WAYS:
            start = time.monotonic()
            for _ in range(values.steps):
                states[way], sums = made[way](states[way], batches)
                jax.block_until_ready(sums)
            if number:  # the first round compiles
                times[way].append(1000 * (time.monotonic() - start) / values.steps)
    medians = {way: statistics.median(times[way]) for way in _WAYS}
    base = medians["one by one"]
    return (
        f"| {network} | {run.spec.batch_size:,} | {base:.2f} | "
        + " | ".join(f"{medians[way] / base:.3f}" for way in _WAYS[1:])
        + " |"
    )


def main() -> None:
    """Measures every network, prints the table, and writes it if --write is given."""
    values = flags.FLAGS
    lines = [
        f"Time of one update of each of {values.runs} runs. jax {jax.__version__}, "
        f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores. Medians of "
        f"{values.rounds} blocks of {values.steps} updates. `one by one` calls a program for each run. In "
        "the last three columns, one program updates all runs: in sequence (`in turn`), in a loop "
        "(`lax.map`) or vectorized (`vmap`). These columns are relative to `one by one`; below 1 is faster.",
        "",
        "| network | batch | one by one, ms | in turn | lax.map | vmap |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for network in values.networks:
        lines.append(measure(network))
        print(lines[-1], flush=True)
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    flags.DEFINE_string(
        "data_dir", None, "Folder with MNIST's original files (default: download them)."
    )
    flags.DEFINE_list("networks", ["mlp", "lstm", "lenet5"], "Networks to measure.")
    flags.DEFINE_integer("runs", 5, "Runs side by side.", lower_bound=2)
    flags.DEFINE_integer("steps", 20, "Updates in each measured block.", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "Blocks of each variant.", lower_bound=1)
    flags.DEFINE_bool("write", False, "Whether to write side_by_side.md beside this file.")
    cli.run_main(main)
