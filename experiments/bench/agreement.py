"""Start-up time of several processes, with and without comparing their code, config and data.

  python -m experiments.bench.agreement --write

The recipe digits starts in three processes on this machine; they communicate over loopback. The
measured time is from the start of the processes to the end of the first update. The processes are
started alternately with and without the comparison. The time of the comparison is measured in process
0, which waits for the slowest process. CPU seconds are summed over the processes; other load hardly
changes them.
"""

import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags

from configs.digits import get_config
from experiments.bench.text_throughput import processor
from lamb_tpu import cli
from lamb_tpu.cluster import children, distributed
from lamb_tpu.cluster.host import num_cores
from lamb_tpu.data import TrainLoader
from lamb_tpu.run import identity
from lamb_tpu.run.build import prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARMS = ("with", "without")


@contextlib.contextmanager
def timed(seconds: list[float], compares: bool) -> Iterator[None]:
    """Appends the time of each comparison in the block to `seconds`; skips comparisons unless `compares`."""

    def around(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            began = time.monotonic()
            if compares:
                function(*arguments)
            seconds.append(time.monotonic() - began)

        return call

    before = identity.check_start, identity.check_data, distributed.together
    identity.check_start, identity.check_data = map(around, before[:2])
    if not compares:
        distributed.together = contextlib.nullcontext
    try:
        yield
    finally:
        identity.check_start, identity.check_data, distributed.together = before


def start(spawned: float, compares: bool) -> dict[str, float]:
    """Returns the seconds to the end of the first update, the CPU seconds, and the seconds spent comparing.

    Args:
      spawned: `time.time()` when the processes were started.
      compares: whether the processes compare their code, config and data.
    """
    distributed.initialize()
    seconds: list[float] = []
    config = get_config()
    config.batch_size = 96
    with timed(seconds, compares):
        identity.check_start(config, None)
        run = prepare(config, None)
    distributed.agree(None)  # as in the trainer, with or without a comparison
    loader = TrainLoader(run.train_set, run.recipe.batch_size, config.seed, run.local_rows())
    step = run.make_train_step()
    jax.block_until_ready(step(run.first_state(), run.shard_batch(next(loader))))
    return {
        "all": time.time() - spawned,
        "cpu": time.process_time(),
        "start": seconds[0],
        "data": seconds[1],
    }


def measure(arm: str, processes: int) -> dict[str, float]:
    """Starts new processes; returns the result of process 0, with the CPU time of all processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started, spawned = [], time.time()
    command = [sys.executable, "-m", __spec__.name, f"--arm={arm}", f"--spawned={spawned!r}"]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    for index in range(processes):
        environment = {
            **plain,
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
            "NPROC": "32",
        }
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=children.following(),
            )
        )
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(
            f"exit statuses {[p.returncode for p in started]} are not all 0; run with --arm=with to see why"
        )
    reports = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {**reports[0], "cpu": sum(each["cpu"] for each in reports)}


def page(results: dict[str, list[dict[str, float]]], processes: int) -> str:
    """Returns the page; `results` maps each of `ARMS` to the results of `measure`."""
    totals = {arm: [each["all"] for each in results[arm]] for arm in ARMS}
    work = {arm: [each["cpu"] for each in results[arm]] for arm in ARMS}
    ratios, work_ratios = (
        [a / b for a, b in zip(both["with"], both["without"], strict=True)]
        for both in (totals, work)
    )
    medians = {
        key: statistics.median(each[key] for each in results["with"]) for key in ("start", "data")
    }
    return "\n".join(
        [
            f"Seconds to the first update of digits in {processes} processes, medians of "
            f"{len(ratios)} starts (fastest to slowest): jax {jax.__version__}, {processor()}, "
            f"{num_cores()} cores.",
            "Command: `python -m experiments.bench.agreement --write`",
            "",
            "| processes compare | first update after, s | CPU, s | comparing code and config, s | "
            "comparing data, s |",
            "|---|--:|--:|--:|--:|",
            f"| yes | {_spread(totals['with'])} | {_spread(work['with'])} | {medians['start']:.3f} "
            f"| {medians['data']:.3f} |",
            f"| no | {_spread(totals['without'])} | {_spread(work['without'])} | | |",
            "",
            "Time to the first update with the comparison, divided by the time without the comparison in the "
            f"same round: {_spread(ratios)}. Ratio of the CPU seconds: {_spread(work_ratios)}.",
            "",
        ]
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measures with and without the comparison, prints the page, and writes it if --write is given."""
    values = flags.FLAGS
    if values.arm:
        print(json.dumps(start(values.spawned, values.arm == "with")), flush=True)
        return
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(values.rounds):
        # The arms swap their order in every second round.
        for arm in ARMS if number % 2 else reversed(ARMS):
            results[arm].append(measure(arm, values.processes))
    text = page(results, values.processes)
    print(text)
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 7, "Starts in each arm.")
    flags.DEFINE_integer("processes", 3, "Processes per start.")
    flags.DEFINE_bool("write", False, "Whether to write agreement.md beside this file.")
    flags.DEFINE_enum("arm", None, ARMS, "Internal: one start in this process.")
    flags.DEFINE_float("spawned", 0.0, "Internal: time.time() at the start of the processes.")
    cli.run_main(main)
