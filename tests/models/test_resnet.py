"""ResNet against a NumPy forward pass, and its initial values. See also test_image_networks.py."""

from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu.models.resnet import ResNet
from tests.models import numpy_layers
from tests.raising import rejected

# An odd size, so that a shift by one pixel changes the result.
IMAGES = np.random.default_rng(1).normal(size=(2, 21, 18, 3)).astype(np.float32)


class Basic(ResNet):
    blocks, bottleneck = (2, 1), False


class Bottleneck(ResNet):
    blocks, bottleneck = (1, 2), True


def forward(module: ResNet, tree: Any, x: np.ndarray) -> np.ndarray:
    params, stats = tree["params"], tree["batch_stats"]

    def layer(x: np.ndarray, block: str, conv: str, norm: str, stride: int = 1) -> np.ndarray:
        own = params[block] if block else params
        kernel = own[conv]["kernel"]
        pad = {1: 0, 3: 1, 7: 3}[len(kernel)]
        y = numpy_layers.conv(x, kernel, stride, ((pad, pad), (pad, pad)))
        of = (stats[block] if block else stats)[norm]
        return numpy_layers.norm(y, own[norm], of, 1e-5)

    def relu(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    x = relu(layer(x, "", "stem_conv", "stem_norm", 2 if module.stem == "imagenet" else 1))
    if module.stem == "imagenet":
        x = numpy_layers.max_pool(x, 3, 2, 1)
    for stage, count in enumerate(module.blocks, start=1):
        for index in range(1, count + 1):
            block, stride = f"stage{stage}_block{index}", 2 if (stage, index) == (2, 1) else 1
            if module.bottleneck:
                y = relu(layer(x, block, "conv1", "norm1"))
                y = relu(layer(y, block, "conv2", "norm2", stride))
                y = layer(y, block, "conv3", "norm3")
            else:
                y = relu(layer(x, block, "conv1", "norm1", stride))
                y = layer(y, block, "conv2", "norm2")
            if "projection" in params[block]:
                x = layer(x, block, "projection", "projection_norm", stride)
            x = relu(x + y)
    return x.mean((1, 2)) @ params["output"]["kernel"] + params["output"]["bias"]


@pytest.mark.parametrize(
    "network, stem", [(Basic, "imagenet"), (Bottleneck, "imagenet"), (Basic, "cifar")]
)
def test_forward_pass(network: type[ResNet], stem: str) -> None:
    module = network(num_classes=5, stem=stem)
    tree = numpy_layers.variables(module, IMAGES)
    numpy_layers.check_forward(module, tree, IMAGES, forward(module, tree, IMAGES))


def test_shortcuts() -> None:
    """Only blocks that change the shape have a projection; the first stage of basic blocks changes none."""
    for network, expected in (
        (Basic, {"stage2_block1"}),
        (Bottleneck, {"stage1_block1", "stage2_block1"}),
    ):
        params = numpy_layers.variables(network(), IMAGES)["params"]
        assert {name for name in params if "projection" in params[name]} == expected


@pytest.mark.parametrize("zero_gamma", [True, False])
def test_first_values(zero_gamma: bool) -> None:
    @jax.jit
    def draw(key: jax.Array) -> Any:
        params = Bottleneck(zero_gamma=zero_gamma).init(key, IMAGES, train=False)["params"]
        kernels = params["stage2_block2"]["conv2"], params["stem_conv"], params["output"]
        scales = {
            f"{name}/{norm}": params[name][norm]["scale"]
            for name in params
            if "block" in name
            for norm in params[name]
            if "norm" in norm
        }
        return [layer["kernel"] for layer in kernels], scales

    kernels, scales = draw(jax.random.key(0))
    assert len(scales) == 3 * 3 + 2
    for name, scale in scales.items():
        assert np.all(scale == (0 if zero_gamma and name.endswith("/norm3") else 1)), name
    for kernel, deviation in zip(
        map(np.asarray, kernels),
        (np.sqrt(2 / (9 * 128)), np.sqrt(2 / (49 * 64)), 0.01),
        strict=True,
    ):
        assert abs(np.std(kernel) / deviation - 1) < 0.03
        assert np.abs(kernel).max() > 3 * deviation  # not truncated


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"stem": "mnist"}, ("stem", "mnist", "is unknown", "use imagenet or cifar")),
        ({"zero_gamma": 1}, ("zero_gamma", 1, "has the wrong type", "use True or False")),
        ({"momentum": 1.5}, ("momentum", 1.5, "is out of range", "use 0 to 1")),
    ],
)
def test_errors(fields: dict[str, Any], message: tuple[Any, ...]) -> None:
    with rejected(*message):
        numpy_layers.variables(Basic(**fields), IMAGES)
