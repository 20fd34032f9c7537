"""One placement of a short run, measured: what each process of `distribution.py`'s sweep runs.

Process 0 prints what it found as the last line of its output, one JSON object.
"""

import json
import math
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import cli, data
from lamb_tpu.cluster import distributed
from lamb_tpu.config import base_config
from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.traffic import Collective, collectives, replica_groups
from lamb_tpu.optim import parameters
from lamb_tpu.parallel.mesh import local_rows, replicated
from lamb_tpu.run.build import Run, prepare

STATES = ("replicated", "zero1", "fsdp")
# So that no activation has as many values as a kernel, see `distribution_table.sorted_messages`.
BATCH_SIZE = 128
# On 8 devices a group lies on two of them.
GROUP_SIZE = 32
WARMUP = 10  # updates
_LOWERED = re.compile(
    r" = (\w+)\[([\d,]*)\]\S* (all-reduce|reduce-scatter|all-gather)\([^,)]*\)(.*)"
)


class Cell(NamedTuple):
    """One row of the table."""

    processes: int
    devices: int  # of all processes
    state: str  # one of STATES
    backend: str
    gradient_dtype: str = "float32"
    microbatches: int = 1

    @property
    def name(self) -> str:
        """'2x4 zero1 shard_map float32' for 2 processes of 4 devices each."""
        each = self.devices // self.processes
        name = f"{self.processes}x{each} {self.state} {self.backend} {self.gradient_dtype}"
        return name if self.microbatches == 1 else f"{name} in {self.microbatches}"


def config_for(cell: Cell, width: int, updates: int) -> ConfigDict:
    """LAMB on the embedded digits, two hidden layers with BatchNorm in groups and dropout."""
    config = base_config()
    config.model = ConfigDict(
        {
            "name": "mlp",
            "hidden_sizes": (width, width),
            "batch_norm": True,
            "group_size": GROUP_SIZE,
            "dropout_rate": 0.1,
        }
    )
    config.optimizer = ConfigDict(
        {"name": "lamb", "learning_rate": 0.01, "weight_decay": 0.01, "rules": "no_bias_no_norm"}
    )
    config.task = ConfigDict({"name": "classification", "input_std": 16.0})
    config.batch_size = BATCH_SIZE
    config.accumulation_steps = cell.microbatches
    config.duration = f"{updates} steps"
    config.schedule.warmup = f"{WARMUP} steps"
    config.schedule.decay = "polynomial"
    config.parallel.backend = cell.backend
    config.parallel.exchange.name = cell.gradient_dtype
    if cell.state == "zero1":
        config.parallel.optimizer_state = "zero1"
    if cell.state == "fsdp":
        config.parallel.rules = (("kernel", "fsdp"),)
    return config


def lowered_collectives(text: str, num_devices: int) -> list[Collective]:
    """The collectives of a program before the compiler, each of one array and outside of loops.

    Args:
      text: `as_text(dialect="hlo")` of what was lowered; unlike that of a compiled program it
        names operands without their types.
      num_devices: of the program.
    """
    found = []
    for dtype, sizes, kind, attributes in _LOWERED.findall(text):
        groups = replica_groups(attributes, num_devices)
        values = math.prod(int(size) for size in sizes.split(",") if size)
        if kind == "reduce-scatter":
            values *= len(groups[0])
        elif kind == "all-gather":
            values //= len(groups[0])
        found.append(Collective(kind, groups, (Array(dtype, (values,)),), 1))
    return found


def as_messages(found: list[Collective]) -> list[dict[str, Any]]:
    """Returns the operations among several devices in the form that the table needs.

    `sizes` has the number of values of each array that is summed, scattered or gathered; for an
    array in parts, of the whole array.
    """
    return [
        {
            "kind": one.kind,
            "dtype": one.dtype,
            "count": one.count,
            "sizes": [
                math.prod(array.shape) * (one.group_size if one.kind == "all-gather" else 1)
                for array in one.arrays
            ],
            "sent_bytes": one.count * one.sent_bytes,
        }
        for one in found
        if one.group_size > 1
    ]


def held_bytes(tree: Any) -> int:
    """Returns the largest number of bytes of the arrays on a device of this process."""
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            size = shard.data.on_device_size_in_bytes()
            held[shard.device] = held.get(shard.device, 0) + size
    return max(held.values())


def differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns each pair's largest difference, relative to the largest expected value."""
    return {
        name: float(np.abs(found[name] - value).max() / np.abs(value).max())
        for name, value in expected.items()
    }


def measure(run: Run, cell: Cell, updates: int, started: float) -> dict[str, Any]:
    """Trains and measures.

    Args:
      run: of `config_for(cell, ...)`.
      cell: the placement.
      updates: to make.
      started: `time.time()` at which the processes were started.

    Returns:
      The figures, and under `params` the last parameters by path.
    """
    lowered = run.make_train_step().lower(run.abstract_state, run.abstract_batch())
    step = lowered.compile()
    state, losses = run.first_state(), []
    rows = local_rows(BATCH_SIZE, run.mesh)
    loader = data.TrainLoader(run.train_set, BATCH_SIZE, run.config.seed, rows)
    for batch, _ in zip(loader, range(updates)):
        state, sums = jax.block_until_ready(step(state, run.shard_batch(batch)))
        if not losses:
            seconds = time.time() - started
        total, weight = sums["loss"]
        losses.append(float(total) / float(weight))
    # The CPU compiler turns sums in bfloat16 into sums in float32.
    narrow = cell.gradient_dtype != "float32"
    if narrow:
        found = lowered_collectives(lowered.as_text(dialect="hlo"), cell.devices)
    else:
        found = collectives(step.as_text())
    gather = jax.jit(lambda tree: tree, out_shardings=replicated(run.mesh))
    params = {
        path: np.asarray(leaf.addressable_data(0))
        for path, leaf in zip(
            parameters.leaf_paths(state.params), jax.tree.leaves(gather(state.params)), strict=True
        )
    }
    return {
        "seconds": seconds,
        "losses": [losses[0], losses[-1]],
        "held_bytes": held_bytes((state.params, state.opt_state)),
        "messages": as_messages(found),
        "shapes": {name: value.shape for name, value in params.items()},
        "params": params,
    }


def main() -> None:
    """Measures one cell in all its processes, and tells in the first."""
    values = flags.FLAGS
    distributed.initialize()
    cell = Cell(*json.loads(values.cell))
    run = prepare(config_for(cell, values.width, values.updates), None)
    found = measure(run, cell, values.updates, values.started)
    params = found.pop("params")
    if jax.process_index() == 0:
        reference = pathlib.Path(values.reference)
        if not reference.exists():
            np.savez(reference, **params)
        with np.load(reference) as expected:
            found["differences"] = differences(params, dict(expected))
        print(json.dumps({"cell": cell, **found}), flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("cell", None, "The fields of Cell as a JSON list.")
    flags.DEFINE_string("reference", None, "File of the 1-device run's parameters, made if absent.")
    flags.DEFINE_integer("width", 512, "Of both hidden layers.")
    flags.DEFINE_integer("updates", 20, "To make.")
    flags.DEFINE_float("started", 0.0, "time.time() at which the processes were started.")
    cli.run_main(main)
