"""Tests that the PyTorch networks of the CPU benchmark have as many parameters as our networks."""

import math

import jax
import pytest

from experiments.bench.step_networks import NETWORKS, config_of
from lamb_tpu.run.build import prepare

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", NETWORKS)
def test_sizes(name: str) -> None:
    run = prepare(config_of(NETWORKS[name]), None, jax.devices()[:1])
    ours = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.abstract_state.params))
    assert sum(value.numel() for value in NETWORKS[name].peer(torch).parameters()) == ours
