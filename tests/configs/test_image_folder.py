"""Tests the recipe for a folder of the user's images."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.run.weights import network_of
from lamb_tpu.spec import parse
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.data.images.photographs import encode
from tests.models.test_convert import state

RECIPE = tiny.ROOT / "configs" / "image_folder.py"


def make(argument: str) -> ConfigDict:
    config = tiny.recipe_file(RECIPE).get_config(argument)
    parse(config)
    return config


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Makes 96 images of 32 by 40 pixels in three classes, each with a different tint."""
    path, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for label, name in enumerate(("blue", "green", "red")):
        (path / name).mkdir()
        for index in range(32):
            pixels = rng.integers(0, 160, (32, 40, 3), np.uint8)
            pixels[..., 2 - label] += 90
            (path / name / f"{index}.png").write_bytes(encode(pixels, "png"))
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Saves random weights for timm's ResNet-18, scaled to keep activations near 1."""
    path, tensors = tmp_path_factory.mktemp("timm"), state("resnet18", 7)
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            tensor *= np.sqrt(2 / np.prod(tensor.shape[1:]))
        elif name.endswith("running_var"):
            tensors[name] = 0.5 + np.abs(tensor)
    safetensors_numpy.save_file(tensors, path / "model.safetensors")
    settings = {
        "architecture": "resnet18.a1_in1k",
        "num_classes": 7,
        "pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
    }
    (path / "config.json").write_text(json.dumps(settings))
    return path


def test_settings_from_the_folder(photographs: pathlib.Path, weights: pathlib.Path) -> None:
    config = make(f"dir={photographs},weights={weights}")
    options = config.data.options
    assert (config.data.name, config.data.dir) == ("image_folder", str(photographs))
    assert (config.data.train_split, config.data.eval_split) == ("train", "train")
    assert (options.size, options.num_classes, options.holdout) == (32, 3, 0.1)
    assert (config.model.name, config.model.num_classes) == ("resnet18", 3)
    assert config.task.input_mean == (127.5,) * 3 and config.task.input_std == (51.0,) * 3
    assert (config.init_from, config.init.new_parameters) == (str(weights), "^output/")
    assert config.batch_size == 8  # twelve updates per epoch of 96 images
    scratch = make(f"dir={photographs},model=efficientnet_b0,batch=32")
    assert (scratch.model.name, scratch.batch_size, scratch.init_from) == (
        "efficientnet_b0",
        32,
        None,
    )
    assert scratch.task.input_mean == (123.675, 116.28, 103.53)


def test_splits_and_large_images(tmp_path: pathlib.Path) -> None:
    content = encode(np.zeros((300, 400, 3), np.uint8))
    for index in range(200):
        name = f"{'train' if index < 180 else 'test'}/{index % 3}/{index}.jpg"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    config = make(f"dir={tmp_path}")
    assert (config.data.train_split, config.data.eval_split) == ("train", "test")
    assert (config.data.options.size, config.data.options.holdout) == (224, 0.0)
    assert config.batch_size == 16
    assert make(f"dir={tmp_path},model=efficientnet_b5").data.options.size == 288


@pytest.mark.long
def test_one_command_fine_tunes(
    photographs: pathlib.Path,
    weights: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    config = make(f"dir={photographs},weights={weights},epochs=2,batch=16")
    config.log.tensorboard = False
    metrics = train(config, tmp_path, quiet=True)
    record = json.loads((tmp_path / "init.json").read_text())
    assert record["new"] == ["params/output/bias", "params/output/kernel"]
    assert record["init_from"] == str(weights) and record["left"] == []
    losses = [actual["loss"] for actual in read_records(tmp_path / "metrics.jsonl", "train")]
    assert losses[-1] < losses[0] and metrics["accuracy"] > 0.4
    # The weights may also come from a run.
    assert network_of(str(tmp_path)) == ("resnet18", ((127.5,) * 3, (51.0,) * 3))
    assert make(f"dir={photographs},weights={tmp_path}").task.input_std == (51.0,) * 3


@pytest.mark.parametrize("content", [None, "{", "[]", '{"architecture": "vit"}', '{"a": 1}'])
def test_weights_without_a_network(tmp_path: pathlib.Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert network_of(str(tmp_path)) is None


def test_errors(tmp_path: pathlib.Path, weights: pathlib.Path) -> None:
    with pytest.raises(UserError, match="model is 'vit', which is unknown; use .*resnet18"):
        make("model=vit")
    (tmp_path / "one" / "a").mkdir(parents=True)
    (tmp_path / "two" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="has no split called train or training, only one, two"):
        make(f"dir={tmp_path}")
    absent = make("dir=nowhere,weights=nowhere_either")
    with pytest.raises(UserError, match="config.(data.dir=nowhere|init_from='nowhere_either')"):
        train(absent, tmp_path / "run", quiet=True)
