"""Time of an update with a batch size that can change, with and without gradient statistics.

  python -m experiments.bench.changing_batch --write

For each network, three contenders make an update with k microbatches, which stay on the device:

- the step compiled for this k;
- the two programs of `parallel.changing.ChangingStep`. The host calls the first program once per
  microbatch or, on a CPU, once per group of up to eight microbatches;
- one program that loops over k microbatches, and therefore needs memory for the largest possible
  number of microbatches (here 2 k).

The two programs also measure gradient statistics: the noise scale, the similarity of the gradients of
half batches, and per-example gradients in one of 100 updates. The contenders alternate in one
process, in a new order in each round, because the state of caches and memory depends on the previous
contender. Read the ratios. Ratios of CPU time, summed over all threads of this process, hardly depend
on other load.
"""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from experiments.bench.step_networks import NETWORKS, Network, config_of
from lamb_tpu import cli
from lamb_tpu.cluster.host import num_cores, processor
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.compiling import compiler_options
from lamb_tpu.parallel.gradient_statistics import NO_STATISTICS, Statistics
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.spec import changed

Iteration = Callable[[], Any]
ROWS = 16  # number of examples for which per-example gradients are computed
# Statistics that the two programs measure, each in a contender; one contender measures none.
MEASURED = {
    "noise scale": Statistics(noise_scale=True),
    "preconditioned": Statistics(noise_scale=True, preconditioned=True),
    "halves": Statistics(halves=True),
    "one by one": Statistics(per_example=ROWS),
}


def run_of(network: Network, count: int) -> Run:
    """Returns a run of the network with batches of `count` microbatches."""
    rows = network.batch * count
    changes = {"data.options.count": rows, "batch_size": rows, "accumulation_steps": count}
    config = changed(config_of(network), changes)
    return prepare(config, None)


def of_one_size(run: Run) -> Iteration:
    """Returns a function that makes an update with the step compiled for the run's batch size."""
    step, state = run.make_train_step(), run.first_state()
    batch = run.shard_batch(run.train_set.gather(np.arange(run.spec.batch_size)))

    def iterate() -> None:
        nonlocal state
        state, sums = step(state, batch)
        jax.block_until_ready((state, sums))

    return iterate


def changing(run: Run, statistics: Statistics = NO_STATISTICS) -> tuple[ChangingStep, list[Any]]:
    """Returns the step for any number of microbatches, and the microbatches of the run's batch."""
    granularity = run.spec.batch_size // run.spec.accumulation_steps
    microbatch = run.abstract_rows(granularity, run.train_set.element_spec)
    step = ChangingStep(
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        microbatch,
        parts=run.parts,
        statistics=statistics,
    )
    indices = np.arange(run.spec.batch_size).reshape(-1, granularity)
    return step, [
        rows_lib.shard_batch(run.train_set.gather(each), granularity, run.mesh) for each in indices
    ]


def by_host(run: Run, statistics: Statistics = NO_STATISTICS) -> Iteration:
    """Returns a function that makes an update with the two programs and measures these statistics."""
    step, microbatches = changing(run, statistics)
    state = run.first_state()

    def iterate() -> None:
        nonlocal state
        state, sums = step(state, microbatches, per_example=True)
        jax.block_until_ready((state, sums))

    return iterate


def in_program(run: Run, capacity: int) -> Iteration:
    """Returns a function that makes an update with one program, with memory for `capacity` microbatches."""
    step, microbatches = changing(run)
    state, count = run.first_state(), np.int32(len(microbatches))
    spare = [jax.tree.map(jnp.zeros_like, microbatches[0])] * (capacity - len(microbatches))
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *microbatches, *spare)
    weights = step.weights(microbatches)
    zeros = jax.eval_shape(step.zeros)

    def update(state: Any, stacked: Any, weights: Any, count: jax.Array) -> Any:
        def add(index: jax.Array, total: Any) -> Any:
            batch = jax.tree.map(lambda field: field[index], stacked)
            return step.added(state, total, batch, weights, index, count)

        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), zeros)
        total = lax.fori_loop(0, count, add, start)
        return step.updated(
            state, total, jnp.float32(jnp.nan)
        )  # a learning rate, which the schedule ignores

    compiled = jax.jit(update, donate_argnums=0, compiler_options=compiler_options(run.mesh))

    def iterate() -> None:
        nonlocal state
        state, sums = compiled(state, stacked, weights, count)
        jax.block_until_ready((state, sums))

    return iterate


def measure(network: Network, count: int, rounds: int, seconds: float) -> dict[str, np.ndarray]:
    """Returns wall and CPU seconds of each contender's updates.

    Each array has the shape (2, n), for n rounds. There are at least `rounds` rounds, which together take
    at least `seconds`.
    """
    run = run_of(network, count)
    iterations = {
        "one size": of_one_size(run),
        "two programs": by_host(run),
        "one program": in_program(run, 2 * count),
    }
    # With BatchNorm, per-example gradients do not exist: the examples of a batch interact.
    iterations |= {
        name: by_host(run, statistics)
        for name, statistics in MEASURED.items()
        if not (statistics.per_example and run.abstract_state.model_state)
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in iterations}
    order, draw = list(iterations), np.random.default_rng(0)
    start = time.perf_counter()
    while len(times[order[0]]) <= rounds or time.perf_counter() - start < seconds:
        for name in order:
            begun, used = time.perf_counter(), time.process_time()
            iterations[name]()
            times[name].append((time.perf_counter() - begun, time.process_time() - used))
        draw.shuffle(order)
    return {name: np.array(each[1:]).T for name, each in times.items()}


def row(name: str, batch: int, count: int, seconds: dict[str, np.ndarray]) -> str:
    """Returns a row of a table; the cell of an absent contender is '-'."""

    def ratio(of: str, to: str) -> float:
        # Take ratios within a round, in which both contenders ran under about the same load.
        return float(np.median(seconds[of] / seconds[to]))

    others = ("two programs", "one program")
    cells = [f"{1e3 * np.median(seconds['one size']):.1f}"]
    cells += [f"{ratio(key, 'one size'):.3f}" for key in others]
    cells += [f"{ratio(key, 'two programs'):.3f}" for key in MEASURED if key != "one by one"]
    if "one by one" in seconds:
        # Only one update per interval measures per-example gradients and takes longer.
        interval = Statistics().interval
        cells += [f"{(interval - 1 + ratio('one by one', 'two programs')) / interval:.3f}"]
    else:
        cells += ["-"]
    return f"| {name} | {batch} | {count} | {' | '.join(cells)} |"


def main() -> None:
    """Measures, prints the tables, and writes them if --write is given."""
    values = flags.FLAGS
    timings = []
    for name in values.networks:
        network = NETWORKS[name]
        timings += [
            (name, network.batch, count, measure(network, count, values.rounds, values.seconds))
            for count in map(int, values.counts)
        ]
    given = f"--networks={','.join(values.networks)} --counts={','.join(values.counts)}"
    lines = [
        f"Time of an update of k microbatches: jax {jax.__version__}, {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}, {processor()}, {num_cores()} core(s). {values.note}",
        "",
        "Ratios are taken within a round; the table has their medians, over at least "
        f"{values.rounds} rounds and at least {values.seconds:g} seconds. A ratio above 1 is "
        "slower. `one size` is the step compiled for this k. `two programs` and `one program` are compiled "
        "once and serve any k (`one program`: up to a maximum). The host calls the first of the two "
        "programs for each microbatch or group of microbatches; "
        "the one program loops over the microbatches on the device. In the last four columns, the two "
        "programs also measure a statistic, and their time is relative to `two programs` without "
        "statistics: the noise scale; the noise scale together with its preconditioned form; the "
        "similarity of the gradients of half batches; and, as `one by one`, the per-example gradients of "
        f"{ROWS} examples in every {Statistics().interval}th update.",
        f"Command: `python -m experiments.bench.changing_batch --rounds={values.rounds} "
        f"--seconds={values.seconds:g} {given}`",
    ]
    for kind, title in enumerate(("Wall time", "CPU time")):
        lines += [
            "",
            f"{title}:",
            "",
            "| network | microbatch | k | one size, ms | two programs / one size | "
            "one program / one size | noise scale | preconditioned too | halves | one by one |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        lines += [
            row(name, batch, count, {key: each[kind] for key, each in seconds.items()})
            for name, batch, count, seconds in timings
        ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_list("networks", list(NETWORKS), "Networks to measure.")
    flags.DEFINE_list("counts", ["1", "4"], "Numbers of microbatches.")
    flags.DEFINE_string("note", "", "Note for the page, such as other load on the machine.")
    flags.DEFINE_integer("rounds", 9, "Minimum number of rounds.", lower_bound=1)
    flags.DEFINE_float(
        "seconds", 0.0, "Minimum time of each row, in seconds; makes more rounds if they fit."
    )
    flags.DEFINE_bool("write", False, "Whether to write changing_batch.md beside this file.")
    cli.run_main(main)
