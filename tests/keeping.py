"""Configs of runs whose exchange has a residual, by the method's name; `tests.killing` runs them."""

from typing import Any

from ml_collections import ConfigDict

from tests import tiny

UPDATES = 40
ONEBIT_LAMB = {"name": "onebit_lamb", "learning_rate": 0.02, "freeze_step": 15}
SGD = {"name": "sgd", "learning_rate": 0.3}
# The optimizer and the exchange of each method. All methods but PowerSGD have stages.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "onebit_lamb": (ONEBIT_LAMB, {"name": "onebit"}),
    "dgc": (SGD, {"name": "dgc", "ratio": 0.05, "warmup_steps": 20, "warmup_stages": 2}),
    "powersgd": (SGD, {"name": "powersgd", "rank": 4}),
}
# Completed updates after which the compiled program changes.
CHANGES = {"onebit_lamb": [15], "dgc": [10, 20], "powersgd": []}


def config(name: str) -> ConfigDict:
    optimizer, exchange = METHODS[name]
    return tiny.digits(
        parallel__backend="shard_map",
        optimizer=ConfigDict(optimizer),
        parallel__exchange=ConfigDict(exchange),
        duration=f"{UPDATES} steps",
        checkpoint__every="3 steps",
        checkpoint__keep=3,
        eval__every="20 steps",
        log__every="2 steps",
    )
