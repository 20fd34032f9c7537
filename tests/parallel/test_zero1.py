"""Tests that with every optimizer ZeRO-1 gives the same results in less memory."""

from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.optim import factory
from tests.marks import some
from tests.optim.catalogue import REDUCING
from tests.parallel.nets import difference, trained

NUM_STEPS = 5
RATES = {"sgd": 0.5, "momentum": 0.1, "nesterov": 0.1, "lars": 2.0, "adagrad_norm": 0.5}
# Options with which an optimizer computes over several tensors, or over a complete split tensor.
FIELDS = {
    "lamb": {"clip_global_norm": 0.5, "collect": True, "phi_bounds": (0.1, 2.0)},
    "lars": {"norm": "linf", "clip_global_norm": 0.5},
    "novograd": {"clip_global_norm": 0.5},
    "adam": {"clip_global_norm": 0.5},
    "apollo": {"rank": 2, "seed": 1},
}
PLACES = {
    "jit": {"parallel__optimizer_state": "zero1"},
    "shard_map": {"parallel__optimizer_state": "zero1", "parallel__backend": "shard_map"},
}


def run(num_devices: int, name: str, **changes: Any) -> tuple[Any, Any]:
    optimizer = ConfigDict(
        {"name": name, "learning_rate": RATES.get(name, 0.02), "rules": "no_bias_no_norm"}
        | FIELDS.get(name, {})
    )
    state, _, run = trained(
        num_devices, NUM_STEPS, optimizer=optimizer, schedule__warmup="0 steps", **changes
    )
    return state, run


# The optimizers in `REDUCING` reject ZeRO-1.
SPLITTING = [name for name in factory.OPTIMIZERS if name not in REDUCING]


@pytest.mark.long
@pytest.mark.parametrize("name", some(SPLITTING, ("lamb", "lars")))
def test_every_optimizer(name: str) -> None:
    whole, _ = run(1, name)
    for backend, place in PLACES.items():
        # These optimizers need unsplit matrices, and reject split matrices.
        if backend == "shard_map" and name in ("muon", "adafactor"):
            continue
        actual, prepared = run(8, name, **place)
        assert difference(actual.params, whole.params) < 1e-6, backend
        moved = jax.jit(prepared.init)(jax.random.key(0)).params
        assert difference(whole.params, moved) > 1e-3
        for leaf, sharding in zip(
            jax.tree.leaves(actual.opt_state),
            jax.tree.leaves(prepared.shardings.opt_state),
            strict=True,
        ):
            held = leaf.addressable_shards[0].data.size
            assert held == np.prod(sharding.shard_shape(leaf.shape))
            # Only arrays with lengths that 8 does not divide are replicated, such as the last bias,
            # scalars, and Muon's three coefficients.
            assert held == leaf.size // 8 or leaf.size in (0, 1, 2, 3, 10, 20), leaf.shape
