"""Start-up of several processes with and without the comparison of their code, config and data.

  python -m experiments.bench.agreement --write

The recipe digits starts in three processes on this machine, which talk over loopback: from the
start of the processes to the end of the first update. Starts with the comparison alternate with
starts without it. The time in the comparison is that of process 0, which waits for the slowest.
CPU seconds are those of all processes; unlike the time, they hardly depend on what else runs.
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
from lamb_tpu.cluster import distributed
from lamb_tpu.cluster.host import num_cores
from lamb_tpu.data import TrainLoader
from lamb_tpu.run import identity
from lamb_tpu.run.build import prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARMS = ("with", "without")


@contextlib.contextmanager
def timed(found: list[float], compares: bool) -> Iterator[None]:
    """Appends the time of each comparison in the block to `found`, or leaves comparisons out."""

    def around(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            began = time.monotonic()
            if compares:
                function(*arguments)
            found.append(time.monotonic() - began)

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
    """Returns the seconds to the end of the first update, and those of the comparisons.

    Args:
      spawned: `time.time()` when the processes were started.
      compares: whether the processes compare what they were started with.
    """
    distributed.initialize()
    seconds: list[float] = []
    config = get_config()
    config.batch_size = 96
    with timed(seconds, compares):
        identity.check_start(config, None)
        run = prepare(config, None)
    distributed.agree(None)  # as the trainer does, with or without a comparison
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
    """Returns what `start` does in process 0 of several new ones, with the CPU time of all."""
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
            )
        )
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"a process ended with {[p.returncode for p in started]}")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {**found[0], "cpu": sum(each["cpu"] for each in found)}


def page(found: dict[str, list[dict[str, float]]], processes: int) -> str:
    """Returns the page of the starts of each arm."""
    totals = {arm: [each["all"] for each in found[arm]] for arm in ARMS}
    work = {arm: [each["cpu"] for each in found[arm]] for arm in ARMS}
    ratios, work_ratios = (
        [a / b for a, b in zip(both["with"], both["without"], strict=True)]
        for both in (totals, work)
    )
    parts = {
        key: statistics.median(each[key] for each in found["with"]) for key in ("start", "data")
    }
    return "\n".join(
        [
            f"Seconds to the first update of digits in {processes} processes, medians of "
            f"{len(ratios)} starts (fastest to slowest): jax {jax.__version__}, {processor()}, "
            f"{num_cores()} cores.",
            "Command: `python -m experiments.bench.agreement --write`",
            "",
            "| processes compare | to the first update | CPU seconds | of the time, code and config "
            "| data |",
            "|---|--:|--:|--:|--:|",
            f"| yes | {_spread(totals['with'])} | {_spread(work['with'])} | {parts['start']:.3f} "
            f"| {parts['data']:.3f} |",
            f"| no | {_spread(totals['without'])} | {_spread(work['without'])} | | |",
            "",
            "Ratio of a start with the comparison to one without it in the same round: "
            f"{_spread(ratios)}; of CPU seconds: {_spread(work_ratios)}.",
            "",
        ]
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measures both arms in turn, prints the page and writes it if asked."""
    values = flags.FLAGS
    if values.arm:
        print(json.dumps(start(values.spawned, values.arm == "with")), flush=True)
        return
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(values.rounds):
        # Either arm is first in every second round.
        for arm in ARMS if number % 2 else reversed(ARMS):
            found[arm].append(measure(arm, values.processes))
    text = page(found, values.processes)
    print(text)
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 7, "Starts of each arm.")
    flags.DEFINE_integer("processes", 3, "Processes of a start.")
    flags.DEFINE_bool("write", False, "Whether to write agreement.md beside this file.")
    flags.DEFINE_enum("arm", None, ARMS, "For the program itself: one start in this process.")
    flags.DEFINE_float("spawned", 0.0, "For the program itself: the time of its start.")
    cli.run_main(main)
