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
from tests.quick import OPTIONS, jit

BATCH_NORM = ConfigDict(
    {"name": "mlp", "hidden_sizes": (24, 16), "batch_norm": True, "group_size": 8}
)
DROPOUT = ConfigDict({"name": "mlp", "hidden_sizes": (24, 16), "dropout_rate": 0.3})
LAMB = ConfigDict({"name": "lamb", "learning_rate": 0.02, "rules": "no_bias_no_norm"})
LARS = ConfigDict(
    {"name": "lars", "learning_rate": 2.0, "momentum": 0.9, "rules": "no_bias_no_norm"}
)


def trained(
    num_devices: int, num_steps: int, **changes: Any
) -> tuple[state_lib.TrainState, list[dict[str, Any]], Run]:
    """The state after some updates of `tiny.digits(**changes)`, each update's sums, and the run.

    A run on one device is made once for all tests; nothing of it may be changed or donated.
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
    init = jit(run.init, out_shardings=run.shardings)
    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch()).compile(OPTIONS)
    state, sums = init(jax.random.key(run.config.seed), {}), []
    loader = data.TrainLoader(
        run.train_set, run.config.batch_size, run.config.seed, run.local_rows()
    )
    for batch, _ in zip(loader, range(num_steps)):
        state, found = step(state, run.shard_batch(batch))
        sums.append(jax.device_get(found))
    return state, sums, run


def difference(found: Any, expected: Any) -> float:
    """The largest difference of two trees' leaves, each relative to the leaf's largest value."""
    found, expected = tiny.arrays(found), tiny.arrays(expected)
    assert found.keys() == expected.keys() and found
    return max(
        np.abs(found[name] - value).max() / max(np.abs(value).max(), 1e-30)
        for name, value in expected.items()
    )


class WeightedSum:
    """A task of two terms, means of (x . p - y)^2 / 2 and of x . p, whose examples have weights of
    their own in each: `w` in the first and `v` in the second.
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
    """A layer of bfloat16 for images of 64 pixels; `NARROW` is its name in a config."""

    def init(key: jax.Array, inputs: jax.Array) -> Any:
        kernel = jax.random.normal(key, (inputs[0].size, 10), jnp.bfloat16)
        return {"params": {"kernel": 0.1 * kernel, "bias": jnp.zeros(10, jnp.bfloat16)}}

    def apply(variables: Any, inputs: jax.Array, *, train: bool, key: Any = None) -> Any:
        params, rows = variables["params"], inputs.reshape(len(inputs), -1)
        logits = rows.astype(jnp.bfloat16) @ params["kernel"] + params["bias"]
        return logits.astype(jnp.float32), {}

    return init, apply


NARROW = "tests.parallel.nets:narrow"
