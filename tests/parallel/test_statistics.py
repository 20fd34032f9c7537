"""Networks that keep statistics of the batch by themselves are refused where it is cut."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.errors import UserError
from lamb_tpu.models.norm import BatchNorm
from lamb_tpu.parallel import statistics
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.parallel.nets import difference, trained

SHARD_MAP = {"parallel__backend": "shard_map"}
MICROBATCHES = {"accumulation_steps": 2}


class Centred(nn.Module):
    """Takes the mean of the batch away, and keeps a running one."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mean = self.variable("running", "centre", jnp.zeros, x.shape[-1])
        if train:
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return x - mean.value


class Counted(nn.Module):
    """Counts its calls."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        calls = self.variable("calls", "count", jnp.zeros, ())
        if train:
            calls.value = calls.value + 1
        return x


class Network(nn.Module):
    """A dense layer, a layer of some kind and another dense layer."""

    kind: str = "flax"
    axis_name: Any = None

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(8, use_bias=False)(inputs.reshape(len(inputs), -1))  # a norm takes it away
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
def test_statistics_of_a_part_are_refused(kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        prepare(tiny.digits(model=model(kind), **changes), None)
    text = str(error.value)
    assert text.startswith("config.model: the model's layer 'norm' keeps statistics of its own")
    assert "make it lamb_tpu.models.norm.BatchNorm, or take 'jit' and 1" in text
    assert "first" not in text and "\n" not in text


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
def test_what_is_right_is_not_refused(kind: str, changes: dict[str, Any]) -> None:
    prepare(tiny.digits(model=model(kind), **changes), None)


def test_state_that_nobody_combines_is_refused() -> None:
    with pytest.raises(UserError, match="the model's layer 'norm' keeps"):
        prepare(tiny.digits(model=model("count"), **MICROBATCHES), None)
    assert prepare(tiny.digits(model=model("flax"), **MICROBATCHES), None, training=False)


@pytest.mark.long
def test_what_would_have_come_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under shard_map the layer of Flax gives other weights, silently; ours the same."""
    monkeypatch.setattr(statistics, "check_statistics", lambda *_, **__: None)
    for kind, least, most in (("flax", 1e-2, np.inf), ("ours", 0, 1e-4)):
        jit, named = (
            trained(8, 3, model=model(kind), **changes)[0].params for changes in ({}, SHARD_MAP)
        )
        assert least <= difference(named, jit) <= most, kind
