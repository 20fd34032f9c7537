"""Tests that the same weights give the same logits here and in timm or torchvision.

The networks must also have the same numbers of parameters and multiply-adds. `make
test-interchange` runs these tests; they are skipped without PyTorch, timm and torchvision.
"""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
timm = pytest.importorskip("timm", reason="timm is not installed")
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
import safetensors.torch  # noqa: E402

from lamb_tpu.export import export  # noqa: E402
from lamb_tpu.models.convert import NETWORKS, from_timm  # noqa: E402
from lamb_tpu.models.listing import describe  # noqa: E402
from lamb_tpu.run.weights import open_weights  # noqa: E402
from tests import tiny  # noqa: E402
from tests.data.images.photographs import encode, smooth  # noqa: E402

# One side of the images is odd and the other even: TensorFlow pads the two sides differently at each
# of five strided layers.
IMAGES = np.random.default_rng(0).uniform(-2, 2, (3, 75, 90, 3)).astype(np.float32)


def randomised(network: Any) -> Any:
    """Randomises a network's weights, with BatchNorm statistics that keep activations near 1.

    The statistics are those of a batch, slightly changed. Otherwise activations, and so the logits,
    would grow or vanish from layer to layer.
    """
    generator = torch.Generator().manual_seed(1)

    def noise(tensor: Any) -> Any:
        return torch.rand(tensor.shape, generator=generator)

    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.copy_(0.5 + noise(module.weight))
                module.bias.copy_(noise(module.bias) - 0.5)
                module.momentum = 1.0
            elif getattr(module, "bias", None) is not None:
                module.bias.copy_(noise(module.bias) - 0.5)
        network.train()(torch.from_numpy(IMAGES.transpose(0, 3, 1, 2)))
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                shift = 0.1 * (noise(module.running_mean) - 0.5)
                module.running_mean.add_(shift * module.running_var.sqrt())
                module.running_var.mul_(1.0 + 0.2 * noise(module.running_var))
    return network.eval()


def assert_agree(network: Any, name: str, tensors: Any) -> None:
    with torch.no_grad():
        theirs = network(torch.from_numpy(IMAGES.transpose(0, 3, 1, 2))).numpy()
    model = models.build(NETWORKS[name], num_classes=theirs.shape[-1])
    variables = from_timm(name, tensors)
    ours = jax.jit(lambda v, x: model.apply(v, x, train=False)[0])(variables, IMAGES)
    assert 0.05 < np.std(theirs, 0).mean() < 10  # logits differ between images
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["tf_efficientnet_b0", "tf_efficientnet_b1", "resnet18", "resnet50"]
)
def test_logits_are_those_of_timm(name: str) -> None:
    torch.manual_seed(0)
    network = randomised(timm.create_model(name, num_classes=11))
    assert_agree(network, name, network.state_dict())


@pytest.mark.parametrize("name", ["resnet34", "resnet50"])
def test_logits_are_those_of_torchvision(name: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    network = randomised(getattr(torchvision.models, name)(num_classes=7))
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(network.state_dict(), file)
    assert_agree(network, name, file)


@pytest.mark.parametrize("name", NETWORKS)
def test_multiply_adds_and_parameters(name: str) -> None:
    ours = describe(NETWORKS[name])
    actual = []

    def count(layer: Any, inputs: Any, output: Any) -> None:
        del inputs
        actual.append(output[0].numel() * layer.weight[0].numel())

    with torch.device("meta"):
        network = timm.create_model(name).eval()
        for layer in network.modules():
            if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
                layer.register_forward_hook(count)
        network(torch.zeros(1, 3, *ours.input_shape[:2]))
    assert ours.multiply_adds == sum(actual)
    assert ours.parameters == sum(parameter.numel() for parameter in network.parameters())


def test_folder_that_timm_writes(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    network = randomised(timm.create_model("tf_efficientnet_b0", num_classes=11))
    timm.models.save_for_hf(network, tmp_path, safe_serialization=True)
    weights = open_weights(str(tmp_path), "config.init_from")
    assert weights.model == {"name": "efficientnet_b0"}
    mean, deviation = (network.pretrained_cfg[kind] for kind in ("mean", "std"))
    np.testing.assert_allclose(weights.pixels, 255 * np.array([mean, deviation]), atol=1e-3)
    expected = from_timm("tf_efficientnet_b0", network.state_dict())["params"]
    jax.tree.map(np.testing.assert_array_equal, weights.params(), expected)


@pytest.mark.parametrize("name", ["tf_efficientnet_b0", "resnet50"])
def test_timm_reads_our_files(name: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    network = randomised(timm.create_model(name, num_classes=11))
    timm.models.save_for_hf(network, tmp_path / "theirs", safe_serialization=True)
    export(tmp_path / "theirs", tmp_path / "ours")
    read = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    for (item, actual), (other, expected) in zip(
        read.state_dict().items(), network.state_dict().items(), strict=True
    ):
        assert item == other
        if not item.endswith("num_batches_tracked"):
            np.testing.assert_array_equal(actual.numpy(), expected.numpy(), err_msg=item)
    photographs = timm.data.resolve_model_data_config(read)
    for kind in ("mean", "std"):
        np.testing.assert_allclose(photographs[kind], network.pretrained_cfg[kind], atol=1e-5)


def test_timm_reads_a_run(tmp_path: pathlib.Path) -> None:
    for index in range(8):
        file = tmp_path / "set" / "train" / "ab"[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode(smooth(80, 80, index), "png"))
    config = tiny.digits(
        data__name="image_folder",
        data__dir=str(tmp_path / "set"),
        data__train_split="train",
        data__eval_split="train",
        batch_size=8,
        data__options=ConfigDict({"size": 75, "central_fraction": 0.9}),
        model=ConfigDict({"name": "resnet18", "num_classes": 2}),
        task=ConfigDict({"name": "classification", "input_mean": 100.0, "input_std": 51.0}),
    )
    tiny.save(config, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    read = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    variables = open_weights(str(tmp_path / "run"), "--workdir").variables()
    actual = from_timm("resnet18", read.state_dict())
    jax.tree.map(np.testing.assert_array_equal, actual, variables)
    photographs = timm.data.resolve_model_data_config(read)
    assert tuple(photographs["input_size"]) == (3, 75, 75) and photographs["crop_pct"] == 0.9
    assert photographs["interpolation"] == "bilinear"
    np.testing.assert_allclose(photographs["mean"], [100 / 255] * 3)
    np.testing.assert_allclose(photographs["std"], [0.2] * 3)
