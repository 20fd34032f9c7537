"""The step benchmark: networks have valid configs, and tables and profiles have all values."""

import jax
import numpy as np
import pytest

from experiments.bench import cpu_profile, step
from experiments.bench.step_networks import NETWORKS, config_of
from lamb_tpu.run.build import prepare
from tests.marks import some


@pytest.mark.parametrize("name", some(NETWORKS, ("LeNet-5", "BERT")))
def test_networks_are_recipes(name: str) -> None:
    network = NETWORKS[name]
    run = prepare(config_of(network), None, jax.devices()[:2])
    assert run.recipe.batch_size == len(run.train_set) == network.batch
    shape = next(iter(run.abstract_batch().values())).shape
    assert shape == (
        (network.batch, network.pixels, network.pixels, network.channels)
        if network.pixels
        else (network.batch, 128)
    )


def test_times_are_of_updates() -> None:
    model = {"name": "mlp", "hidden_sizes": (8,), "num_classes": 10}
    network = NETWORKS["LeNet-5"]._replace(model=model, batch=16, peer=missing)
    updates = step.contenders(network)
    assert updates.keys() == {"ours"}
    seconds = {"ours": 0.2, "eager": 0.1, "compiled": 0.3}
    line = step.row("LeNet-5", network, seconds)
    assert line == "| LeNet-5 | 16 x 28 | 200 | 100 | 300 | 2.00 |"
    del seconds["eager"], seconds["compiled"]
    assert step.row("LeNet-5", network, seconds).endswith("| - | - | - |")
    for update in updates.values():
        update()


def missing(torch: object) -> None:
    raise ImportError


def test_random_examples_are_the_same_in_each_run() -> None:
    options = {"size": 8, "channels": 3, "count": 4}
    from experiments.bench import step_data

    first, second = (step_data.images("all", **options).gather(np.arange(4)) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.long
def test_profile_has_every_operation_of_an_update() -> None:
    model = {"name": "mlp", "hidden_sizes": (512,), "num_classes": 10}
    update = step.ours(NETWORKS["LeNet-5"]._replace(model=model, batch=256))
    total, seconds = cpu_profile.profile(update)
    assert seconds.keys() == set(cpu_profile.TYPES)
    assert seconds["products and sums"] > 0 and seconds["element-wise"] > 0
    assert total <= sum(seconds.values()) + 1e-9


@pytest.mark.parametrize(
    "operation, kind",
    [
        ("convolution.1", "convolutions"),
        ("conv_general_dilated.3", "convolutions"),
        ("ynn_fusion", "products and sums"),
        ("dot.7", "products and sums"),
        ("copy.2", "copies"),
        ("transpose_copy_fusion", "copies"),
        ("slice_concatenate_fusion", "copies"),
        ("broadcast_subtract_fusion.9", "element-wise"),
        ("convert_add_fusion", "element-wise"),
    ],
)
def test_types(operation: str, kind: str) -> None:
    assert cpu_profile.kind_of(operation) == kind
