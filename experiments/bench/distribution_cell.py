"""Measures a short run with one sharding; each process that `distribution.py` starts runs this module.

Process 0 prints the result as the last line of its output, one JSON object.
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

from lamb_tpu import cli, data
from lamb_tpu.cluster import distributed
from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.traffic import Collective, collectives, replica_groups
from lamb_tpu.optim import parameters
from lamb_tpu.parallel.mesh import replicated
from lamb_tpu.parallel.rows import local_rows
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.spec import Spec, changed

STATES = ("replicated", "zero1", "fsdp")
# `distribution_table.sorted_messages` needs a batch whose activations differ in size from all kernels.
BATCH_SIZE = 128
# On 8 devices, a BatchNorm group spans two devices.
GROUP_SIZE = 32
WARMUP = 10  # updates
_LOWERED = re.compile(
    r" = (\w+)\[([\d,]*)\]\S* (all-reduce|reduce-scatter|all-gather)\([^,)]*\)(.*)"
)


class Cell(NamedTuple):
    """One row of the table."""

    processes: int
    devices: int  # over all processes
    state: str  # one of STATES
    backend: str
    gradient_dtype: str = "float32"
    microbatches: int = 1

    @property
    def name(self) -> str:
        """Returns a name such as '2x4 zero1 shard_map float32', for 2 processes with 4 devices each."""
        each = self.devices // self.processes
        name = f"{self.processes}x{each} {self.state} {self.backend} {self.gradient_dtype}"
        return name if self.microbatches == 1 else f"{name} in {self.microbatches}"


def config_for(cell: Cell, width: int, updates: int) -> Spec:
    """Returns the config: LAMB, the bundled digits, two hidden layers with BatchNorm and dropout."""
    changes = {
        "model": {
            "name": "mlp",
            "hidden_sizes": (width, width),
            "batch_norm": True,
            "group_size": GROUP_SIZE,
            "dropout_rate": 0.1,
        },
        "optimizer": {
            "name": "lamb",
            "learning_rate": 0.01,
            "weight_decay": 0.01,
            "rules": "no_bias_no_norm",
        },
        "task": {"name": "classification", "input_std": 16.0},
        "batch_size": BATCH_SIZE,
        "accumulation_steps": cell.microbatches,
        "duration": f"{updates} steps",
        "schedule.warmup": f"{WARMUP} steps",
        "schedule.decay": "polynomial",
        "parallel.backend": cell.backend,
        "parallel.exchange.name": cell.gradient_dtype,
        "parallel.optimizer_state": "zero1" if cell.state == "zero1" else "replicated",
        "parallel.rules": (("kernel", "fsdp"),) if cell.state == "fsdp" else (),
    }
    return changed(Spec(), changes)


def lowered_collectives(text: str, num_devices: int) -> list[Collective]:
    """Returns a lowered program's collectives; each must have one array and be outside loops.

    Args:
      text: `as_text(dialect="hlo")` of the lowered program; unlike the text of a compiled program,
        this text names operands without their types.
      num_devices: number of devices of the program.
    """
    operations = []
    for dtype, sizes, kind, attributes in _LOWERED.findall(text):
        groups = replica_groups(attributes, num_devices)
        values = math.prod(int(size) for size in sizes.split(",") if size)
        if kind == "reduce-scatter":
            values *= len(groups[0])
        elif kind == "all-gather":
            values //= len(groups[0])
        operations.append(Collective(kind, groups, (Array(dtype, (values,)),), 1))
    return operations


def as_messages(operations: list[Collective]) -> list[dict[str, Any]]:
    """Returns the operations among several devices as the dictionaries that `distribution_table` reads.

    `sizes` has the number of values of each array that is summed, scattered or gathered; for sharded
    arrays, the number of values of the full array.
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
        for one in operations
        if one.group_size > 1
    ]


def held_bytes(tree: Any) -> int:
    """Returns the bytes of the tree's arrays on the device of this process that holds the most."""
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            size = shard.data.on_device_size_in_bytes()
            held[shard.device] = held.get(shard.device, 0) + size
    return max(held.values())


def differences(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns each array's largest absolute difference, divided by its largest absolute expected value."""
    return {
        name: float(np.abs(actual[name] - value).max() / np.abs(value).max())
        for name, value in expected.items()
    }


def measure(run: Run, cell: Cell, updates: int, started: float) -> dict[str, Any]:
    """Trains and measures.

    Args:
      run: made from `config_for(cell, ...)`.
      cell: the sharding and backend.
      updates: number of updates.
      started: `time.time()` when the processes were started.

    Returns:
      The measurements; `params` maps paths to the final parameters.
    """
    lowered = run.make_train_step().lower(run.abstract_state, run.abstract_batch())
    step = lowered.compile()
    state, losses = run.first_state(), []
    rows = local_rows(BATCH_SIZE, run.mesh)
    loader = data.TrainLoader(run.train_set, BATCH_SIZE, run.spec.seed, rows)
    for batch, _ in zip(loader, range(updates)):
        state, sums = jax.block_until_ready(step(state, run.shard_batch(batch)))
        if not losses:
            seconds = time.time() - started
        total, weight = sums["loss"]
        losses.append(float(total) / float(weight))
    # Read bfloat16 sums before compilation: the CPU compiler replaces them with float32 sums.
    narrow = cell.gradient_dtype != "float32"
    if narrow:
        operations = lowered_collectives(lowered.as_text(dialect="hlo"), cell.devices)
    else:
        operations = collectives(step.as_text())
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
        "messages": as_messages(operations),
        "shapes": {name: value.shape for name, value in params.items()},
        "params": params,
    }


def main() -> None:
    """Measures one cell in all of its processes, and prints the result in process 0."""
    values = flags.FLAGS
    distributed.initialize()
    cell = Cell(*json.loads(values.cell))
    run = prepare(config_for(cell, values.width, values.updates), None)
    result = measure(run, cell, values.updates, values.started)
    params = result.pop("params")
    if jax.process_index() == 0:
        reference = pathlib.Path(values.reference)
        if not reference.exists():
            np.savez(reference, **params)
        with np.load(reference) as expected:
            result["differences"] = differences(params, dict(expected))
        print(json.dumps({"cell": cell, **result}), flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("cell", None, "The fields of Cell as a JSON list.")
    flags.DEFINE_string(
        "reference", None, "File with the parameters of the 1-device run; created if missing."
    )
    flags.DEFINE_integer("width", 512, "Width of both hidden layers.")
    flags.DEFINE_integer("updates", 20, "Number of updates.")
    flags.DEFINE_float("started", 0.0, "time.time() when the processes were started.")
    cli.run_main(main)
