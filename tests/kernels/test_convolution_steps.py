"""Tests that training steps with every form of convolution and pooling do not depend on sharding."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, models
from lamb_tpu.kernels.convolution import convolve
from lamb_tpu.kernels.pooling import max_pool_2x2, max_pool_3x3
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.marks import some

ROWS, UPDATES = 32, 2
PLACEMENTS = [  # devices, backend, microbatches
    (8, "jit", 1),
    (8, "jit", 2),
    (8, "shard_map", 1),
    (8, "shard_map", 2),
    (2, "shard_map", 4),
    (1, "jit", 4),
]


class EveryForm(nn.Module):
    """A network of convolutions: with and without strides, depthwise, 1x1, and with few outputs."""

    num_classes: int = 10
    dtype: str = "float32"

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(
            nn.Conv, conv_general_dilated=convolve, dtype=jnp.dtype(self.dtype)
        )
        x = conv(8, (3, 3), name="plain")(inputs)
        x = max_pool_3x3(nn.relu(conv(8, (3, 3), feature_group_count=8, name="depthwise")(x)))
        x = conv(16, (1, 1), name="pointwise")(x)
        x = nn.relu(conv(16, (3, 3), 2, feature_group_count=16, name="depthwise_strided")(x))
        x = max_pool_2x2(nn.relu(conv(16, (3, 3), name="few_outputs")(x)))
        x = nn.Dense(self.num_classes, name="dense")(x.reshape(x.shape[0], -1))
        return x.astype(jnp.float32)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODULES, "every_form", EveryForm)


@functools.cache
def trained(devices: int, backend: str, microbatches: int, dtype: str) -> tuple[Any, Any]:
    """Returns all parameters before and after the updates."""
    settings = tiny.digits(
        model=ConfigDict({"name": "every_form", "dtype": dtype}),
        batch_size=ROWS,
        accumulation_steps=microbatches,
        schedule__warmup="0 steps",
        parallel__backend=backend,
    )
    run = prepare(settings, None, jax.devices()[:devices])
    loader = data.TrainLoader(run.train_set, ROWS, 0, run.local_rows())
    state, step = run.first_state(), run.make_train_step()
    start = jax.device_get(state.params)
    for _ in range(UPDATES):
        state, _ = step(state, run.shard_batch(next(loader)))
    return start, jax.device_get(state.params)


@pytest.mark.long
@pytest.mark.parametrize("dtype, room", [("float32", 2e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("placement", some(PLACEMENTS, PLACEMENTS[1:4:2]))
def test_sharding_makes_no_difference(
    placement: tuple[int, str, int], dtype: str, room: float
) -> None:
    start, one = trained(1, "jit", 1, dtype)
    same, other = trained(*placement, dtype)
    tiny.assert_equal(start, same)

    def moved(ours: Any, theirs: Any) -> dict[str, float]:
        both = tiny.arrays(ours), tiny.arrays(theirs)
        return {name: float(np.linalg.norm(both[0][name] - both[1][name])) for name in both[0]}

    apart, length = moved(other, one), moved(one, start)
    assert len(length) == 12 and all(length.values())
    for name, distance in apart.items():
        assert distance <= room * length[name], name
