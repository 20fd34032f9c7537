"""Prints a table of features and of the exchanges that support each, according to the config checks."""

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.parallel.exchange import spread
from tests.parallel.nets import BATCH_NORM

# Columns: three exchanges with any optimizer, and an optimizer that compresses its momentum.
COLUMNS: dict[str, dict[str, Any]] = {
    "`float32`": {},
    "`bfloat16`": {"parallel__exchange": {"name": "bfloat16"}},
    "other exchanges": {"parallel__exchange": {"name": spread.NAME}},
    "momentum": {
        "parallel__exchange": {"name": spread.NAME},
        "optimizer": {"name": "tests.parallel.exchange.spread:momentum", "learning_rate": 0.1},
    },
}
FSDP = (("hidden0/kernel", "fsdp"),)
ROWS: dict[str, dict[str, Any]] = {
    "backend `jit`": {"parallel__backend": "jit"},
    "one device": {"devices": 1},
    "`optimizer_state='zero1'`": {"parallel__optimizer_state": "zero1"},
    "parameters split by `'fsdp'`": {"parallel__rules": FSDP},
    "`mesh.data=2, mesh.fsdp=4`": {"mesh__data": 2, "mesh__fsdp": 4},
    "`mesh.data=2, mesh.fsdp=4` with `'zero1'`": {
        "mesh__data": 2,
        "mesh__fsdp": 4,
        "parallel__optimizer_state": "zero1",
    },
    "`mesh.model`, `mesh.sequence`": {"mesh__model": 2},
    "`accumulation_steps`": {"accumulation_steps": 2},
    "BatchNorm over several devices": {"model": {**BATCH_NORM.to_dict(), "group_size": 32}},
    "`ema.decay`": {"ema__decay": 0.9},
    "`guards.max_skipped`": {"guards__max_skipped": 3},
    "`guards.desync_every`": {"guards__desync_every": "4 steps"},
    "a batch that changes": {"batch_rule": {"name": "ramp", "points": ((0, 64),)}},
    "`statistics.noise_scale`": {"statistics__noise_scale": True},
    "`statistics.halves`": {"statistics__halves": True},
    "`statistics.per_example`": {"statistics__per_example": 8},
    "`optimizer.clip_global_norm`": {"optimizer__clip_global_norm": 1.0},
}


def outcome(changes: dict[str, Any]) -> str:
    """Returns '' if a config with these changes passes all checks, otherwise the error message."""
    changes = {
        key: ConfigDict(value) if isinstance(value, dict) else value
        for key, value in {"parallel__backend": "shard_map", **changes}.items()
    }
    devices = jax.devices()[: changes.pop("devices", 8)]
    try:
        prepare(tiny.digits(**changes), None, devices)
    except UserError as error:
        return str(error)
    return ""


def table() -> str:
    """Returns the table as Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row, changes in ROWS.items():
        cells = ["no" if outcome({**column, **changes}) else "yes" for column in COLUMNS.values()]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    for row, changes in ROWS.items():
        for name, column in COLUMNS.items():
            if output := outcome({**column, **changes}):
                print(f"{row}, {name}: {output}")
