"""Networks and tasks for the tests of the step: BatchNorm, dropout, unequal weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.run.build import Run, prepare
from tests import tiny

BATCH_NORM = ConfigDict(
    {"name": "mlp", "hidden_sizes": (24, 16), "batch_norm": True, "group_size": 8}
)
SHARD_MAP = {"parallel__backend": "shard_map"}
ZERO1 = {"parallel__optimizer_state": "zero1"}
DROPOUT = ConfigDict({"name": "mlp", "hidden_sizes": (24, 16), "dropout_rate": 0.3})
LAMB = ConfigDict({"name": "lamb", "learning_rate": 0.02, "rules": "no_bias_no_norm"})
LARS = ConfigDict(
    {"name": "lars", "learning_rate": 2.0, "momentum": 0.9, "rules": "no_bias_no_norm"}
)


def trained(
    num_devices: int, num_steps: int, **changes: Any
) -> tuple[state_lib.TrainState, list[dict[str, Any]], Run]:
    """Trains `tiny.digits(**changes)`; returns the state, the sums of each update, and the run.

    Results on one device are cached for all tests and must not be modified or donated.
    """
    config = tiny.digits(**changes)
    if num_devices > 1:
        return _train(config, num_devices, num_steps)
    key = num_steps, config.to_json()
    if key not in _runs:
        _runs[key] = _train(config, num_devices, num_steps)
    return _runs[key]


_runs: dict[Any, tuple[state_lib.TrainState, list[dict[str, Any]], Run]] = {}


def _train(
    config: ConfigDict, num_devices: int, num_steps: int
) -> tuple[state_lib.TrainState, list[dict[str, Any]], Run]:
    run = prepare(config, None, jax.devices()[:num_devices])
    init = jax.jit(run.init, out_shardings=run.shardings)
    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch()).compile()
    state, sums = init(jax.random.key(run.spec.seed), {}), []
    loader = data.TrainLoader(run.train_set, run.spec.batch_size, run.spec.seed, run.local_rows())
    for batch, _ in zip(loader, range(num_steps)):
        state, actual = step(state, run.shard_batch(batch))
        sums.append(jax.device_get(actual))
    return state, sums, run


def difference(actual: Any, expected: Any) -> float:
    """Returns the largest relative difference between corresponding leaves of two trees.

    A leaf's difference is relative to the largest magnitude in the leaf of `expected`.
    """
    actual, expected = tiny.arrays(actual), tiny.arrays(expected)
    assert actual.keys() == expected.keys() and actual
    return max(
        np.abs(actual[name] - value).max() / max(np.abs(value).max(), 1e-30)
        for name, value in expected.items()
    )


class WeightedSum:
    """A task with two loss terms: a mean of (x . p - y)^2 / 2 and a mean of x . p.

    The first mean is weighted by the field `w`, the second by the field `v`.
    """

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"params": {"p": jax.random.normal(key, (4,))}}

    def weights(self, batch: Any) -> dict[str, jax.Array]:
        return {"error": jnp.sum(batch["w"]), "product": jnp.sum(batch["v"])}

    def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        products = batch["x"] @ params["p"]
        error = jnp.sum(batch["w"] * optax.l2_loss(products, batch["y"]))
        terms = {"error": error, "product": jnp.sum(batch["v"] * products)}
        return terms, (model_state, {"error": (error, jnp.sum(batch["w"]))})


def narrow() -> tuple[Any, Any]:
    """Returns `init` and `apply` of a bfloat16 layer for images; `NARROW` is its name in a config."""

    def init(key: jax.Array, inputs: jax.Array) -> Any:
        kernel = jax.random.normal(key, (inputs[0].size, 10), jnp.bfloat16)
        return {"params": {"kernel": 0.1 * kernel, "bias": jnp.zeros(10, jnp.bfloat16)}}

    def apply(variables: Any, inputs: jax.Array, *, train: bool, key: Any = None) -> Any:
        params, rows = variables["params"], inputs.reshape(len(inputs), -1)
        logits = rows.astype(jnp.bfloat16) @ params["kernel"] + params["bias"]
        return logits.astype(jnp.float32), {}

    return init, apply


NARROW = "tests.parallel.nets:narrow"
