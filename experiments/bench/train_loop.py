"""Time of the training loop relative to the bare compiled step, and the number of compilations.

  python -m experiments.bench.train_loop --data_dir=FOLDER_WITH_THE_FOUR_MNIST_FILES

Trains LeNet and LeNet-5 on MNIST at batch 1,024 with LAMB through `lamb_tpu.train` (data, step,
logging every 10 updates). In alternation, the same process runs the same jitted step on one batch
that stays on the device. The benchmark prints the ratio of the two rates, the seconds to the first
update, and the number of compilations of the step.

With --only_host, the host's time per update is measured instead, with a step that computes nothing.
Three variants alternate: one update per call, --updates_per_call updates per call, and the same number
of updates per call with the training set held on the device, as on an accelerator. The host never waits
for the device, so the host's time is the shortest step time that the host can keep up with.

  python -m experiments.bench.train_loop --only_host --networks=lenet --steps=500
  python -m experiments.bench.train_loop --only_host --networks=davidnet --steps=500 \
      --data_dir=FOLDER_OF_CIFAR10_JPEGS
"""

import contextlib
import io
import os
import pathlib
import re
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from configs import cifar10, mnist_lenet
from lamb_tpu import cli
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import holding
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train

_LOG_EVERY = 10


class CompileCounter:
    """Counts compilations of the training step, from JAX's monitoring events."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **kwargs: str) -> None:
        del seconds
        if event.endswith("backend_compile_duration"):
            self.count += "train_step" in kwargs.get("fun_name", "")


def config_for(network: str):
    """Returns the recipe's config, shortened to the updates of the first record and --steps timed updates."""
    if network == "davidnet":
        config = cifar10.get_config("data=cifar10_jpeg")
    else:
        config = mnist_lenet.get_config(f"network={network}")
    config.duration = f"{flags.FLAGS.steps + _LOG_EVERY} steps"
    config.data.dir = flags.FLAGS.data_dir
    config.data.prepared_dir = flags.FLAGS.prepared_dir
    config.log.every = f"{_LOG_EVERY} steps"
    config.eval.every = config.checkpoint.every = config.duration
    return config


def bare_step(run: Run) -> float:
    """Returns the seconds per update of the jitted step alone, on a batch that stays on the device.

    Two untimed updates come first. As in the trainer, at most two updates are in flight, because a CPU
    gets slower with many queued updates.
    """
    state, step = run.first_state(), run.make_train_step()
    batch = run.shard_batch(run.train_set.gather(np.arange(run.spec.batch_size)))
    for _ in range(2):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    start = time.monotonic()
    before = metrics
    for _ in range(flags.FLAGS.steps):
        state, metrics = step(state, batch)
        jax.block_until_ready(before)
        before = metrics
    jax.block_until_ready((state, metrics))
    return (time.monotonic() - start) / flags.FLAGS.steps


def full_loop(config, counter: CompileCounter) -> tuple[float, float, int]:
    """Runs `train`; returns (seconds per update, seconds to the end of the first update, compilations).

    The rate is measured between the first and the last record, which excludes compilation.
    """
    before = counter.count
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as workdir, contextlib.redirect_stdout(printed):
        train(config, workdir)
        records = read_records(pathlib.Path(workdir) / "metrics.jsonl", "train")
    first, last = records[0], records[-1]
    seconds = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    to_first = re.search(r"first update after ([\d.]+) s", printed.getvalue())
    return seconds, float(to_first[1]), counter.count - before


def free_step(run: Run, *args: Any) -> jax.stages.Wrapped:
    """Returns a program that computes nothing, with the inputs and outputs of the training step."""
    updates = args[2] if len(args) > 2 else 1
    shape = () if updates == 1 else (updates,)
    names = ("accuracy", "loss", "grad_norm", "param_norm")

    def train_step(state: TrainState, *inputs: Any) -> tuple[TrainState, Any]:
        del inputs
        one = jnp.ones(shape)
        return state.replace(step=state.step + updates), dict.fromkeys(names, (one, one))

    return jax.jit(train_step, donate_argnums=0, out_shardings=(run.shardings, None))


def host_time(network: str) -> str:
    """Returns one row of the table of the host's time."""
    updates = flags.FLAGS.updates_per_call
    ways = {"one": (1, False), "several": (updates, False), "held": (updates, True)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    is_held = holding.is_held
    with mock.patch.object(Run, "make_train_step", free_step):
        for _ in range(flags.FLAGS.rounds):
            for name, (most, holds) in ways.items():
                config = config_for(network)
                config.loop.updates_per_call = most
                config.log.every = f"{updates} steps"
                config.log.tensorboard = False
                config.data.eval_split = "test[:64]"  # so that the evaluation takes almost no time
                config.eval.every = config.checkpoint.every = config.duration
                held = (lambda run: True) if holds else is_held
                with mock.patch.object(holding, "is_held", held):
                    times[name].append(1000 * full_loop(config, CompileCounter())[0])
    one, several, held_ms = (statistics.median(times[name]) for name in ways)
    return (
        f"| {network} | {one:.3f} | {several:.3f} | {several / one:.3f} | {held_ms:.3f} | "
        f"{held_ms / one:.3f} |"
    )


def measure(network: str, counter: CompileCounter) -> str:
    """Returns one row of the table."""
    bare, loop, first, compiled = [], [], [], []
    for _ in range(flags.FLAGS.rounds):
        with tempfile.TemporaryDirectory() as workdir:
            bare.append(bare_step(prepare(config_for(network), workdir)))
        seconds, to_first, count = full_loop(config_for(network), counter)
        loop.append(seconds)
        first.append(to_first)
        compiled.append(count)
    bare_ms, loop_ms = (1000 * statistics.median(times) for times in (bare, loop))
    return (
        f"| {network} | {bare_ms:.1f} | {loop_ms:.1f} | {bare_ms / loop_ms:.3f} | "
        f"{statistics.median(first):.1f} | {max(compiled)} |"
    )


def main() -> None:
    """Measures every network, prints the table, and writes it if --write is given."""
    values = flags.FLAGS
    if values.only_host:
        print(
            f"The host's milliseconds per update, with a record every {values.updates_per_call} updates: "
            f"jax {jax.__version__}, {os.cpu_count()} cores. Medians of {values.rounds} blocks of "
            f"{values.steps} updates.\n\n"
            f"| network | 1 update per call | {values.updates_per_call} per call | ratio | "
            f"{values.updates_per_call} per call, data on the device | ratio |\n|---|---|---|---|---|---|"
        )
        for network in values.networks:
            print(host_time(network), flush=True)
        return
    counter = CompileCounter()
    lines = [
        f"Training loop at batch 1,024: jax {jax.__version__}, {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores. Medians of {values.rounds} blocks of "
        f"{values.steps} updates. The ratio is the time of the bare compiled step divided by that of "
        "the full loop; it should be at least 0.85.",
        "",
        "| network | bare step, ms | full loop, ms | ratio | first update after, s | compilations |",
        "|---|---|---|---|---|---|",
        *(measure(network, counter) for network in values.networks),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_string(
        "data_dir", None, "Folder with MNIST's original files (default: download them)."
    )
    flags.DEFINE_string("prepared_dir", None, "Folder of data sets prepared by TFDS.")
    flags.DEFINE_list("networks", ["lenet", "lenet5"], "Networks to measure.")
    flags.DEFINE_integer("steps", 40, "Updates in each measured block.", lower_bound=20)
    flags.DEFINE_integer("rounds", 3, "Blocks of each variant.", lower_bound=1)
    flags.DEFINE_bool(
        "only_host", False, "Measure only the host, with a step that computes nothing."
    )
    flags.DEFINE_integer("updates_per_call", 50, "Updates in a call, for --only_host.", 2)
    flags.DEFINE_bool("write", False, "Whether to write train_loop.md beside this file.")
    cli.run_main(main)
