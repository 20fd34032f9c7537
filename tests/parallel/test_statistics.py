"""Tests that, if the batch is split, batch statistics other than those of `norm.BatchNorm` are rejected."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.models.norm import BatchNorm
from lamb_tpu.parallel import statistics
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.parallel.nets import difference, trained
from tests.raising import rejected

SHARD_MAP = {"parallel__backend": "shard_map"}
MICROBATCHES = {"accumulation_steps": 2}


class Centred(nn.Module):
    """A layer that updates a running mean of the batches, and subtracts the mean."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mean = self.variable("running", "centre", jnp.zeros, x.shape[-1])
        if train:
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return x - mean.value


class Counted(nn.Module):
    """A layer that counts its calls."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        calls = self.variable("calls", "count", jnp.zeros, ())
        if train:
            calls.value = calls.value + 1
        return x


class Network(nn.Module):
    """A dense layer, the layers that `kind` selects, and another dense layer."""

    kind: str = "flax"
    axis_name: Any = None

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        # BatchNorm would cancel a bias.
        x = nn.Dense(8, use_bias=False)(inputs.reshape(len(inputs), -1))
        if self.kind == "beside ours":
            x = BatchNorm(None, not train, self.axis_name, name="first")(x)
        if self.kind in ("flax", "beside ours"):
            x = nn.BatchNorm(not train, name="norm")(x)
        elif self.kind == "ours":
            x = BatchNorm(None, not train, self.axis_name, name="norm")(x)
        else:
            x = {"own": Centred, "count": Counted}[self.kind](name="norm")(x, train)
        return nn.Dense(10)(nn.relu(x))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODULES, "own", Network)


def model(kind: str) -> ConfigDict:
    return ConfigDict({"name": "own", "kind": kind})


@pytest.mark.parametrize("changes", [SHARD_MAP, MICROBATCHES, SHARD_MAP | MICROBATCHES], ids=str)
@pytest.mark.parametrize("kind", ["flax", "own", "beside ours"])
def test_rejects_other_batch_statistics(kind: str, changes: dict[str, Any]) -> None:
    problem = ": the model has running statistics in 'norm', which"
    with rejected("config.model", ..., problem, "use lamb_tpu.models.norm.BatchNorm") as error:
        prepare(tiny.digits(model=model(kind), **changes), None)
    assert "first" not in str(error.value)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("flax", {}),
        ("own", {}),
        ("ours", SHARD_MAP),
        ("ours", MICROBATCHES),
        ("ours", SHARD_MAP | MICROBATCHES),
        ("count", SHARD_MAP),
    ],
    ids=str,
)
def test_accepts_valid_networks(kind: str, changes: dict[str, Any]) -> None:
    prepare(tiny.digits(model=model(kind), **changes), None)


def test_rejects_state_that_microbatches_cannot_combine() -> None:
    with rejected("config.model", ..., "the model has running statistics in 'norm', which"):
        prepare(tiny.digits(model=model("count"), **MICROBATCHES), None)
    assert prepare(tiny.digits(model=model("flax"), **MICROBATCHES), None, training=False)


@pytest.mark.long
def test_without_the_check_weights_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, Flax's layer would give different weights under shard_map; our layer does not."""
    monkeypatch.setattr(statistics, "check_statistics", lambda *_, **__: None)
    for kind, least, most in (("flax", 1e-2, np.inf), ("ours", 0, 1e-4)):
        jit, named = (
            trained(8, 3, model=model(kind), **changes)[0].params for changes in ({}, SHARD_MAP)
        )
        assert least <= difference(named, jit) <= most, kind
