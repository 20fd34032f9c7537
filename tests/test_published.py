"""Weights that timm or torchvision published: a run starts from them, or they are evaluated."""

import json
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy
from ml_collections import ConfigDict
from PIL import Image

from lamb_tpu import evaluate, models
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_weights
from lamb_tpu.models.convert import from_timm
from lamb_tpu.run.build import prepare
from lamb_tpu.run.describe import describe
from lamb_tpu.run.weights import open_weights
from tests import tiny
from tests.data.images.pictures import encode
from tests.models.test_convert import state

CLASSES, SIZE = 5, 32
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
TIMM = {
    "architecture": "resnet18",
    "num_classes": CLASSES,
    "pretrained_cfg": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
}


def tensors() -> dict[str, np.ndarray]:
    """Random ones of timm's ResNet-18 that keep activations near 1."""
    found = state("resnet18", CLASSES)
    for name, tensor in found.items():
        if tensor.ndim > 1:
            tensor *= np.sqrt(2 / np.prod(tensor.shape[1:]))
        elif name.endswith("running_var"):
            found[name] = 0.5 + np.abs(tensor)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder as on the Hugging Face hub; tests must not change it."""
    path = tmp_path_factory.mktemp("timm")
    safetensors_numpy.save_file(tensors(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(TIMM))
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a split to evaluate alone: 4 pictures of each class."""
    path, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in "abcde":
        (path / "val" / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
            (path / "val" / name / f"{index}.png").write_bytes(encode(pixels, "png"))
    return path


def config(pictures: pathlib.Path, init_from: Any, **changes: Any) -> ConfigDict:
    fields = {
        "data__name": "image_folder",
        "data__dir": str(pictures),
        "data__train_split": "val",
        "data__eval_split": "val",
        "init_from": str(init_from),
        "batch_size": 16,
        "data__options": ConfigDict({"size": SIZE, "central_fraction": 1.0}),
        "model": ConfigDict({"name": "resnet18", "num_classes": CLASSES}),
        "task": ConfigDict({"name": "classification", "input_mean": MEAN, "input_std": DEVIATION}),
    }
    return tiny.digits(**fields | changes)


@pytest.mark.long
def test_a_run_starts_from_them(
    folder: pathlib.Path, pictures: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    expected = from_timm("resnet18", folder / "model.safetensors")
    run = prepare(config(pictures, folder, ema__decay=0.5), tmp_path)
    found = run.first_state()
    tiny.assert_equal(found.params, expected["params"])
    tiny.assert_equal(found.model_state, {"batch_stats": expected["batch_stats"]})
    tiny.assert_equal(found.ema, (found.params, found.model_state))
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == run.shardings
    arrays = len(jax.tree.leaves(expected))
    text = f"first weights: {folder}; {arrays} arrays taken; optimizer state new"
    assert text in tiny.unbroken(describe(run))
    assert run.start.record["update"] is None and run.start.record["left"] == ()


def test_a_file_is_that_of_the_model(
    folder: pathlib.Path, pictures: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for path in (folder / "model.safetensors", folder):
        weights = open_weights(str(path), "config.init_from", network="resnet18")
        assert weights.model == {"name": "resnet18"} and weights.bert() is None
        assert set(weights.shapes) == {"params", "model_state"} and weights.text() is None
        assert weights.describe() == str(path)
        assert (weights.pixels is None) == path.is_file()
    np.testing.assert_allclose(weights.pixels, (MEAN, DEVIATION))
    with pytest.raises(UserError, match="is no run's, so it has no update 3"):
        open_weights(str(folder), "--workdir", step=3)
    run = prepare(config(pictures, folder / "model.safetensors"), tmp_path)
    assert f"first weights: {folder / 'model.safetensors'}; " in run.start.describe()


@pytest.mark.long
def test_another_number_of_classes(
    folder: pathlib.Path, pictures: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    other = config(
        pictures,
        folder,
        data__options__num_classes=7,
        model__num_classes=7,
        task__input_mean=(127.5,) * 3,
        init__new_parameters="^output/",
    )
    run = prepare(other, tmp_path)
    assert run.start.describe().endswith(
        "100 arrays taken; new, at random: output/bias, output/kernel; optimizer state new; "
        f"they were trained with config.task.input_mean={MEAN}, here it is (127.5, 127.5, 127.5)"
    )
    expected = from_timm("resnet18", folder / "model.safetensors")["params"]
    found = run.first_state().params
    assert found["output"]["kernel"].shape == (512, 7)
    assert 0.005 < np.std(found.pop("output")["kernel"]) < 0.02
    expected.pop("output")
    tiny.assert_equal(found, expected)
    with pytest.raises(UserError, match="not fit all of the model: 2 of its .* as output/bias;"):
        evaluate_weights(other)


@pytest.mark.long
def test_they_are_evaluated_where_no_run_is(
    folder: pathlib.Path, pictures: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    settings = config(pictures, folder, data__train_split="train", ema__decay=0.9)
    found = evaluate_weights(settings)
    told = tiny.unbroken(capsys.readouterr().err)
    assert told.startswith(f"first weights: {folder}; 102 arrays taken")
    paths = sorted((pictures / "val").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths]).astype(np.float32)
    labels = np.array(["abcde".index(path.parent.name) for path in paths])
    model = models.build("resnet18", num_classes=CLASSES)
    variables = from_timm("resnet18", tensors())
    images = (pixels - np.float32(MEAN)) / np.float32(DEVIATION)
    logits, _ = jax.jit(lambda v, x: model.apply(v, x, train=False))(variables, images)
    logits = np.float64(logits)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    assert found.keys() == {"accuracy", "loss"}
    assert found["accuracy"] == np.mean(logits.argmax(1) == labels)
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-4)
    assert np.std(losses) > 0.3  # pictures are told apart
    assert settings.data.train_split == "train"  # what was given is not changed
    with pytest.raises(UserError, match="or config.data.options.num_classes=10 if it lacks"):
        evaluate_weights(tiny.change(settings, {"model.num_classes": 10}))


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Values:
        workdir, config, step, split = None, None, None, None

    asked: list[Any] = []
    monkeypatch.setattr(evaluate.cpu_devices, "make_from_flags", lambda: None)
    monkeypatch.setattr(evaluate.distributed, "initialize_from_flags", lambda: None)
    monkeypatch.setattr(evaluate.flags, "FLAGS", Values)
    for Values.config in (None, tiny.digits()):
        with pytest.raises(UserError, match="--workdir is missing; .* --config.init_from instead"):
            evaluate.main()
    monkeypatch.setattr(
        evaluate, "evaluate_weights", lambda *given: asked.append(given) or {"accuracy": 0.5}
    )
    Values.config, Values.split = tiny.digits(init_from="there"), "other"
    evaluate.main()
    assert asked == [(Values.config, "other")]
    assert capsys.readouterr().out == '{"accuracy": 0.5}\n'
    Values.step = "3"
    with pytest.raises(UserError, match="--step=3 is of a run's checkpoints; give its --workdir"):
        evaluate.main()


def broken(folder: pathlib.Path, path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A copy with tensors replaced, or left out where they are None."""
    kept = {**tensors(), **changes}
    path.mkdir()
    safetensors_numpy.save_file(
        {name: tensor for name, tensor in kept.items() if tensor is not None},
        path / "model.safetensors",
    )
    shutil.copy(folder / "config.json", path)
    return path


@pytest.mark.long
def test_what_is_refused(
    folder: pathlib.Path,
    pictures: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(path: pathlib.Path, message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=r"^config\.init.*" + message) as error:
            prepare(config(pictures, path, **changes), tmp_path / "run")
        assert "\n" not in str(error.value)

    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # nothing gets as far
    file = folder / "model.safetensors"
    refused(
        folder,
        "of the model 'resnet18', and config.model.name is 'resnet34'; make it the",
        model__name="resnet34",
    )
    refused(
        file,
        r"lacks 80 tensor\(s\): .*; it is taken to be resnet34, for config.model.name",
        model__name="resnet34",
    )
    refused(
        file,
        "is read for config.model.name of efficientnet_b0, .*resnet152, not 'davidnet'",
        model__name="davidnet",
    )
    refused(
        folder,
        r"has output/bias of shape \(5,\), this model of \(7,\); .*new_parameters, now"
        " '', is the regex",
        model__num_classes=7,
        data__options__num_classes=7,
    )
    refused(
        folder,
        r"has stem_conv/kernel of shape \(7, 7, 3, 64\), this model of \(3, 3, 3, 64\)",
        model__stem="cifar",
    )
    refused(
        broken(folder, tmp_path / "less", **{"bn1.bias": None}),
        "less/model.safetensors lacks "
        r"1 tensor\(s\): bn1.bias",
    )
    refused(
        broken(folder, tmp_path / "more", **{"layer5.bias": np.zeros(1)}),
        r"has 1 tensor\(s\) too many: layer5.bias",
    )
    cut = broken(folder, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(file.read_bytes()[:-5])
    refused(cut.parent, "cut/model.safetensors is no complete safetensors file")
    refused(cut, "cut/model.safetensors is no complete safetensors file")
    (cut.parent / "config.json").write_text(json.dumps(TIMM | {"architecture": "resnet50d"}))
    refused(cut.parent, "weights of 'resnet50d' cannot be read; those of timm that can: tf_")
    cut.rename(cut.parent / "pytorch_model.bin")
    pickle = re.escape(str(cut.parent / "pytorch_model.bin"))
    for path in (cut.parent, cut.parent / "pytorch_model.bin"):
        refused(path, f"{pickle} is a pickle of PyTorch's, .*torch.load.'pytorch_model.bin', ")
    refused(folder, "'keep', but .* has no optimizer's state", init__optimizer_state="keep")
    assert not list((tmp_path / "run").rglob("*.*"))
