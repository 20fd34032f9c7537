"""DavidNet against a NumPy forward pass, and its initial values. See also test_image_networks.py."""

from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu.models.davidnet import DavidNet
from tests.models import numpy_layers
from tests.raising import rejected

IMAGES = np.random.default_rng(1).normal(size=(2, 8, 16, 3)).astype(np.float32)


def forward(tree: Any, x: np.ndarray) -> np.ndarray:
    params, stats = tree["params"], tree["batch_stats"]

    def layer(x: np.ndarray, name: str) -> np.ndarray:
        y = numpy_layers.conv(x, params[f"{name}_conv"]["kernel"], 1, ((1, 1), (1, 1)))
        norm = f"{name}_norm"
        return np.maximum(numpy_layers.norm(y, params[norm], stats[norm], 1e-5), 0)

    def pooled(x: np.ndarray) -> np.ndarray:
        return numpy_layers.max_pool(x, 2, 2)

    x = layer(x, "prep")
    x = pooled(layer(x, "layer1"))
    x = x + layer(layer(x, "layer1_branch1"), "layer1_branch2")
    x = pooled(layer(x, "layer2"))
    x = pooled(layer(x, "layer3"))
    x = x + layer(layer(x, "layer3_branch1"), "layer3_branch2")
    return 0.125 * x.max((1, 2)) @ params["output"]["kernel"]


@pytest.mark.parametrize("width", [64, 6])
def test_forward_pass(width: int) -> None:
    module = DavidNet(num_classes=5, width=width)
    tree = numpy_layers.variables(module, IMAGES)
    channels = {
        name: leaf["kernel"].shape[-1] // width
        for name, leaf in tree["params"].items()
        if name.endswith("_conv")
    }
    assert sorted(channels.values()) == [1, 2, 2, 2, 4, 8, 8, 8]
    numpy_layers.check_forward(module, tree, IMAGES, forward(tree, IMAGES))


def test_first_values() -> None:
    inputs = {"prep_conv": 27, "layer2_conv": 9 * 128, "output": 512}

    @jax.jit
    def draw(key: jax.Array) -> dict[str, jax.Array]:
        params = DavidNet().init(key, IMAGES, train=False)["params"]
        return {name: params[name]["kernel"] for name in inputs}

    for name, kernel in draw(jax.random.key(0)).items():
        bound = 1 / np.sqrt(inputs[name])
        assert 0.99 * bound < np.abs(kernel).max() < bound * (1 + 1e-6)
        assert abs(np.std(kernel) / (bound / np.sqrt(3)) - 1) < 0.03


def test_errors() -> None:
    with rejected("width", 0, "is out of range", "use at least 1"):
        numpy_layers.variables(DavidNet(width=0), IMAGES)
    with rejected("the network DavidNet", ..., "cannot process images of shape (28, 28, 1)"):
        numpy_layers.variables(DavidNet(), np.zeros((1, 28, 28, 1), np.float32))
