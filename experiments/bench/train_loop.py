"""Time of the whole training loop against the bare compiled step, and recompilations counted.

  python -m experiments.bench.train_loop --data_dir=FOLDER_WITH_THE_FOUR_MNIST_FILES

Trains LeNet and LeNet-5 on MNIST at batch 1,024 with LAMB through `lamb_tpu.train` (data, step,
logging every 10 updates) and, in the same process and alternating with it, runs the same jitted
step on one batch that stays on the device. Prints the ratio of the two rates, the seconds to the
first update, and how often the step was compiled.
"""

import contextlib
import io
import os
import pathlib
import re
import statistics
import tempfile
import time

import jax
import numpy as np
from absl import flags

from configs import mnist_lenet
from lamb_tpu import cli
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train

_LOG_EVERY = 10


class CompileCounter:
    """Counts compilations of the training step, by JAX's own monitoring events."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **kwargs: str) -> None:
        del seconds
        if event.endswith("backend_compile_duration"):
            self.count += "train_step" in kwargs.get("fun_name", "")


def config_for(network: str):
    """The MNIST recipe, cut to the measured number of updates after the first logged ones."""
    config = mnist_lenet.get_config(f"network={network}")
    config.duration = f"{flags.FLAGS.steps + _LOG_EVERY} steps"
    config.data.dir = flags.FLAGS.data_dir
    config.data.prepared_dir = flags.FLAGS.prepared_dir
    config.log.every = f"{_LOG_EVERY} steps"
    config.eval.every = config.checkpoint.every = config.duration
    return config


def bare_step(run: Run) -> float:
    """Seconds an update of the jitted step alone, on one resident batch, after two warm ones.

    As in the trainer, no more than two updates are under way: with many queued a CPU is slower.
    """
    state, step = run.first_state(), run.make_train_step()
    batch = run.shard_batch(run.train_set.gather(np.arange(run.config.batch_size)))
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


def whole_loop(config, counter: CompileCounter) -> tuple[float, float, int]:
    """(seconds an update, seconds to the end of the first, compilations) of one `train`.

    The rate is taken between the first and the last record: compilation lies before the first.
    """
    before = counter.count
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as workdir, contextlib.redirect_stdout(told):
        train(config, workdir)
        records = read_records(pathlib.Path(workdir) / "metrics.jsonl", "train")
    first, last = records[0], records[-1]
    seconds = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    to_first = re.search(r"first update after ([\d.]+) s", told.getvalue())
    return seconds, float(to_first[1]), counter.count - before


def measure(network: str, counter: CompileCounter) -> str:
    """One row of the table."""
    bare, loop, first, compiled = [], [], [], []
    for _ in range(flags.FLAGS.rounds):
        with tempfile.TemporaryDirectory() as workdir:
            bare.append(bare_step(prepare(config_for(network), workdir)))
        seconds, to_first, count = whole_loop(config_for(network), counter)
        loop.append(seconds)
        first.append(to_first)
        compiled.append(count)
    bare_ms, loop_ms = (1000 * statistics.median(times) for times in (bare, loop))
    return (
        f"| {network} | {bare_ms:.1f} | {loop_ms:.1f} | {bare_ms / loop_ms:.3f} | "
        f"{statistics.median(first):.1f} | {max(compiled)} |"
    )


def main() -> None:
    """Measures every network, prints the table and writes it if asked."""
    counter = CompileCounter()
    values = flags.FLAGS
    lines = [
        f"Batch 1,024: jax {jax.__version__}, {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores. Medians of {values.rounds} "
        f"blocks of {values.steps} updates. Target of the ratio (bare step / whole loop): 0.85.",
        "",
        "| network | bare step, ms | whole loop, ms | ratio | first update after, s | compiled |",
        "|---|---|---|---|---|---|",
        *(measure(network, counter) for network in values.networks),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", None, "Folder with MNIST's original files; else download.")
    flags.DEFINE_string("prepared_dir", None, "Where TFDS keeps prepared sets.")
    flags.DEFINE_list("networks", ["lenet", "lenet5"], "Networks to measure.")
    flags.DEFINE_integer("steps", 40, "Updates in each measured block.", lower_bound=20)
    flags.DEFINE_integer("rounds", 3, "Blocks of each kind.", lower_bound=1)
    flags.DEFINE_bool("write", False, "Whether to write train_loop.md beside this file.")
    cli.run_main(main)
