"""Time of an update by two programs, for batches that may change and statistics of gradients.

  python -m experiments.bench.changing_batch --write

Of each network, an update of k microbatches, all on the device, by three contenders: the step that
is compiled for these k; the two programs of `parallel.changing.ChangingStep`, of which the host
calls the first one for each microbatch, or on a CPU for up to eight; and one program whose loop
takes k as an argument, and so needs an array for the most microbatches that there may be (here
twice as many). The two programs also measure statistics of gradients: the noise scale, the
similarity of halves, and in one update of 100 the gradients of examples one by one. The contenders
take turns in one process, in another order in each round, because what ran before leaves caches and
memory as it does; read the ratios. Those of processor time, which is that of all threads of this
process, stay the same beside other work.
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
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.compiling import compiler_options
from lamb_tpu.parallel.gradient_statistics import NO_STATISTICS, Statistics
from lamb_tpu.run.build import Run, prepare

Turn = Callable[[], Any]
ROWS = 16  # examples whose gradients are taken one by one
# Statistics of a contender, beside those without any.
MEASURED = {
    "noise scale": Statistics(noise_scale=True),
    "preconditioned": Statistics(noise_scale=True, preconditioned=True),
    "halves": Statistics(halves=True),
    "one by one": Statistics(per_example=ROWS),
}


def run_of(network: Network, count: int) -> Run:
    """Returns a run of the network with batches of `count` microbatches."""
    config = config_of(network)
    config.data.options.count = config.batch_size = network.batch * count
    config.accumulation_steps = count
    return prepare(config, None)


def of_one_size(run: Run) -> Turn:
    """Returns an update by the step that is compiled for the run's batch size."""
    step, state = run.make_train_step(), run.first_state()
    batch = run.shard_batch(run.train_set.gather(np.arange(run.config.batch_size)))

    def turn() -> None:
        nonlocal state
        state, sums = step(state, batch)
        jax.block_until_ready((state, sums))

    return turn


def changing(run: Run, statistics: Statistics = NO_STATISTICS) -> tuple[ChangingStep, list[Any]]:
    """Returns the step for any number of microbatches, and those of the run's batch."""
    quantum = run.config.batch_size // run.config.accumulation_steps
    microbatch = run.abstract_rows(quantum, run.train_set.element_spec)
    step = ChangingStep(
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        microbatch,
        parts=run.parts,
        statistics=statistics,
    )
    places = np.arange(run.config.batch_size).reshape(-1, quantum)
    return step, [
        mesh_lib.shard_batch(run.train_set.gather(each), quantum, run.mesh) for each in places
    ]


def by_host(run: Run, statistics: Statistics = NO_STATISTICS) -> Turn:
    """Returns an update by two programs, which takes every statistic."""
    step, microbatches = changing(run, statistics)
    state = run.first_state()

    def turn() -> None:
        nonlocal state
        state, sums = step(state, microbatches, per_example=True)
        jax.block_until_ready((state, sums))

    return turn


def in_program(run: Run, capacity: int) -> Turn:
    """Returns an update by one program, which has room for `capacity` microbatches."""
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
        return step.updated(state, total, jnp.float32(jnp.nan))  # its schedule counts updates

    compiled = jax.jit(update, donate_argnums=0, compiler_options=compiler_options(run.mesh))

    def turn() -> None:
        nonlocal state
        state, sums = compiled(state, stacked, weights, count)
        jax.block_until_ready((state, sums))

    return turn


def measure(network: Network, count: int, rounds: int, seconds: float) -> dict[str, np.ndarray]:
    """Returns the seconds of updates of each contender, by the clock and of the processor.

    The arrays are (2, n), of so many `rounds` or of those within these `seconds`, if they are more.
    """
    run = run_of(network, count)
    turns = {
        "one size": of_one_size(run),
        "two programs": by_host(run),
        "one program": in_program(run, 2 * count),
    }
    # An example of a network with BatchNorm has no gradient of its own.
    turns |= {
        name: by_host(run, statistics)
        for name, statistics in MEASURED.items()
        if not (statistics.per_example and run.abstract_state.model_state)
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    order, draw = list(turns), np.random.default_rng(0)
    start = time.perf_counter()
    while len(times[order[0]]) <= rounds or time.perf_counter() - start < seconds:
        for name in order:
            begun, used = time.perf_counter(), time.process_time()
            turns[name]()
            times[name].append((time.perf_counter() - begun, time.process_time() - used))
        draw.shuffle(order)
    return {name: np.array(each[1:]).T for name, each in times.items()}


def row(name: str, batch: int, count: int, seconds: dict[str, np.ndarray]) -> str:
    """Returns a row of a table; a contender that there is not has no figure."""

    def ratio(of: str, to: str) -> float:
        # Round by round: both were then measured under the same load.
        return float(np.median(seconds[of] / seconds[to]))

    others = ("two programs", "one program")
    cells = [f"{1e3 * np.median(seconds['one size']):.1f}"]
    cells += [f"{ratio(key, 'one size'):.3f}" for key in others]
    cells += [f"{ratio(key, 'two programs'):.3f}" for key in MEASURED if key != "one by one"]
    if "one by one" in seconds:
        # One update of the default interval takes longer.
        interval = Statistics().interval
        cells += [f"{(interval - 1 + ratio('one by one', 'two programs')) / interval:.3f}"]
    else:
        cells += ["-"]
    return f"| {name} | {batch} | {count} | {' | '.join(cells)} |"


def main() -> None:
    """Measures, prints the tables and writes them if asked."""
    values = flags.FLAGS
    found = []
    for name in values.networks:
        network = NETWORKS[name]
        found += [
            (name, network.batch, count, measure(network, count, values.rounds, values.seconds))
            for count in map(int, values.counts)
        ]
    given = f"--networks={','.join(values.networks)} --counts={','.join(values.counts)}"
    lines = [
        f"Updates of k microbatches: jax {jax.__version__}, {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}, {processor()}, {num_cores()} core(s). {values.note}",
        "",
        f"Medians of {values.rounds} rounds, or of those within {values.seconds:g} seconds if they "
        "are more, of ratios in a round. A ratio above 1 is slower: of "
        "two programs for any k, and of one with a loop over k, to the step for one batch size; of "
        "statistics to the two programs without. One by one: the gradients of "
        f"{ROWS} examples in every {Statistics().interval}th update.",
        f"Command: `python -m experiments.bench.changing_batch --rounds={values.rounds} "
        f"--seconds={values.seconds:g} {given}`",
    ]
    for kind, title in enumerate(("By the clock", "Processor time")):
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
            for name, batch, count, seconds in found
        ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_list("networks", list(NETWORKS), "Networks to measure.")
    flags.DEFINE_list("counts", ["1", "4"], "Numbers of microbatches.")
    flags.DEFINE_string("note", "", "What the page says of the machine, such as other work on it.")
    flags.DEFINE_integer("rounds", 9, "Least number of turns of each.", lower_bound=1)
    flags.DEFINE_float("seconds", 0.0, "Least time for each row, if more turns fit into it.")
    flags.DEFINE_bool("write", False, "Whether to write changing_batch.md beside this file.")
    cli.run_main(main)
