"""Cost of a checkpoint in the training loop: the blocking call, and slower updates during writing.

  python -m experiments.bench.save_stall

Makes LAMB updates of a random state, with donated buffers as in the trainer. Each round times updates
alone, then updates while a checkpoint is written in the background, then a synchronous save. The loop
blocks during the save's call, which copies the state off the device. Writing, compression and checksums
run afterwards; they share cores with the updates only if the device is the CPU, as here.
"""

import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

from lamb_tpu import cli, optim
from lamb_tpu.store.checkpoint import Checkpoints

_NUM_LEAVES = 24


def make_state(megabytes: int) -> tuple[Any, Callable[[Any], Any]]:
    """Returns parameters and LAMB's moments of this total size, and an update function that donates them."""
    width = int((megabytes * 2**20 / 4 / 3 / _NUM_LEAVES) ** 0.5)
    keys = jax.random.split(jax.random.key(0), _NUM_LEAVES)
    params = {f"kernel{i}": jax.random.normal(key, (width, width)) for i, key in enumerate(keys)}
    tx = optim.lamb(0.001, rules=[(".*", {})])

    def step(state: Any) -> Any:
        params, opt_state = state
        grads = jax.tree.map(jnp.sin, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return (params, tx.init(params)), jax.jit(step, donate_argnums=0)


def timed(step: Callable[[Any], Any], state: Any) -> tuple[Any, float]:
    """Returns the next state, and the seconds until it is ready."""
    start = time.monotonic()
    state = jax.block_until_ready(step(state))
    return state, time.monotonic() - start


def measure(directory: pathlib.Path) -> dict[str, list[float]]:
    """Returns the seconds of each timed action, without the first round, which compiles."""
    values = flags.FLAGS
    state, step = make_state(values.megabytes)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("alone", "call", "written", "beside", "waited")
    }
    with Checkpoints(directory, keep=1) as checkpoints:
        for number in range(values.rounds + 1):
            if number == 1:
                for times in seconds.values():
                    times.clear()
            for _ in range(values.steps):
                state, one = timed(step, state)
                seconds["alone"].append(one)

            start = time.monotonic()
            checkpoints.save(2 * number, state, {})
            seconds["call"].append(time.monotonic() - start)
            # A checkpoint gets its final name when it is complete.
            while not (directory / str(2 * number)).exists():
                state, one = timed(step, state)
                seconds["beside"].append(one)
            seconds["written"].append(time.monotonic() - start)
            checkpoints.wait()

            start = time.monotonic()
            checkpoints.save(2 * number + 1, state, {})
            checkpoints.wait()
            seconds["waited"].append(time.monotonic() - start)
    return seconds


def main() -> None:
    """Measures, prints the table, and writes it if --write is given."""
    values = flags.FLAGS
    with tempfile.TemporaryDirectory(dir=values.directory) as directory:
        seconds = measure(pathlib.Path(directory))
    update, call, written, beside, waited = (
        statistics.median(seconds[name])
        for name in ("alone", "call", "written", "beside", "waited")
    )
    rows = [
        ("update alone", update, 1.0),
        ("call of the save, which blocks the loop", call, call / update),
        ("update while the checkpoint is written", beside, beside / update),
        ("from the call until the checkpoint is complete", written, written / update),
        ("blocking save", waited, waited / update),
    ]
    lines = [
        f"State of {values.megabytes} MB of random float32 values (parameters and LAMB's moments), "
        f"jax {jax.__version__}, "
        f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores. Medians of "
        f"{values.rounds} rounds; in all, {len(seconds['beside'])} updates ran while checkpoints were "
        "written.",
        *([values.note] if values.note else []),
        "",
        "| what | ms | relative to an update alone |",
        "|---|--:|--:|",
        *(f"| {what} | {1000 * time_:.1f} | {ratio:.2f} |" for what, time_, ratio in rows),
        "",
        f"The call takes {call / waited:.3f} times as long as a blocking save.",
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_integer("megabytes", 300, "Size of the state.", lower_bound=1)
    flags.DEFINE_integer("steps", 10, "Updates per round without a save.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Timed rounds.", lower_bound=1)
    flags.DEFINE_string(
        "directory", None, "Folder for the checkpoints (default: the system's temporary folder)."
    )
    flags.DEFINE_string("note", "", "Note for the page, such as other load on the machine.")
    flags.DEFINE_bool("write", False, "Whether to write save_stall.md beside this file.")
    cli.run_main(main)
