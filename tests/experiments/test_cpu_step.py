"""The networks of the benchmark of a step on a CPU: recipes that train here."""

import jax
import numpy as np
import pytest

from experiments.bench import cpu_step
from experiments.bench.cpu_networks import NETWORKS, config_of
from lamb_tpu.run.build import prepare
from tests.marks import some


@pytest.mark.parametrize("name", some(NETWORKS, ("LeNet-5", "BERT")))
def test_networks_are_recipes(name: str) -> None:
    network = NETWORKS[name]
    run = prepare(config_of(network), None, jax.devices()[:2])
    assert run.recipe.batch_size == len(run.train_set) == network.batch
    shape = next(iter(run.abstract_batch().values())).shape
    assert shape == (
        (network.batch, network.pixels, network.pixels, network.channels) if network.pixels
        else (network.batch, 128)
    )


def test_times_are_of_updates() -> None:
    model = {"name": "mlp", "hidden_sizes": (8,), "num_classes": 10}
    network = NETWORKS["LeNet-5"]._replace(model=model, batch=16, peer=missing)
    updates = cpu_step.contenders(network)
    assert updates.keys() == {"ours"}
    seconds = {"ours": 0.2, "eager": 0.1, "compiled": 0.3}
    line = cpu_step.row("LeNet-5", network, seconds)
    assert line == "| LeNet-5 | 16 x 28 | 200 | 100 | 300 | 2.00 |"
    del seconds["eager"], seconds["compiled"]
    assert cpu_step.row("LeNet-5", network, seconds).endswith("| - | - | - |")
    for update in updates.values():
        update()


def missing(torch: object) -> None:
    raise ImportError


def test_random_examples_are_the_same_in_each_run() -> None:
    options = {"size": 8, "channels": 3, "count": 4}
    from experiments.bench import cpu_data

    first, second = (cpu_data.images("all", **options).gather(np.arange(4)) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
