"""Tests runs that start from weights published by timm or torchvision, and evaluations of such weights."""

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
from tests.data.images.photographs import encode
from tests.models.test_convert import state

CLASSES, SIZE = 5, 32
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
TIMM = {
    "architecture": "resnet18",
    "num_classes": CLASSES,
    "pretrained_cfg": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
}


def tensors() -> dict[str, np.ndarray]:
    """Returns random tensors of timm's ResNet-18 that keep activations near 1."""
    actual = state("resnet18", CLASSES)
    for name, tensor in actual.items():
        if tensor.ndim > 1:
            tensor *= np.sqrt(2 / np.prod(tensor.shape[1:]))
        elif name.endswith("running_var"):
            actual[name] = 0.5 + np.abs(tensor)
    return actual


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder in the format of the Hugging Face Hub; do not change it."""
    path = tmp_path_factory.mktemp("timm")
    safetensors_numpy.save_file(tensors(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(TIMM))
    return path


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with only a split for evaluation: 4 images of each class."""
    path, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in "abcde":
        (path / "val" / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
            (path / "val" / name / f"{index}.png").write_bytes(encode(pixels, "png"))
    return path


def config(photographs: pathlib.Path, init_from: Any, **changes: Any) -> ConfigDict:
    fields = {
        "data__name": "image_folder",
        "data__dir": str(photographs),
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
    folder: pathlib.Path, photographs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    expected = from_timm("resnet18", folder / "model.safetensors")
    run = prepare(config(photographs, folder, ema__decay=0.5), tmp_path)
    actual = run.first_state()
    tiny.assert_equal(actual.params, expected["params"])
    tiny.assert_equal(actual.model_state, {"batch_stats": expected["batch_stats"]})
    tiny.assert_equal(actual.ema, (actual.params, actual.model_state))
    assert jax.tree.map(lambda leaf: leaf.sharding, actual) == run.shardings
    arrays = len(jax.tree.leaves(expected))
    text = f"initial weights: {folder}; {arrays} arrays taken; optimizer state new"
    assert text in tiny.unbroken(describe(run))
    assert run.start.record["update"] is None and run.start.record["left"] == ()


def test_a_file_is_that_of_the_model(
    folder: pathlib.Path, photographs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for path in (folder / "model.safetensors", folder):
        weights = open_weights(str(path), "config.init_from", network="resnet18")
        assert weights.model == {"name": "resnet18"} and weights.bert() is None
        assert set(weights.shapes) == {"params", "model_state"} and weights.text() is None
        assert weights.describe() == str(path)
        assert (weights.pixels is None) == path.is_file()
    np.testing.assert_allclose(weights.pixels, (MEAN, DEVIATION))
    with pytest.raises(UserError, match="is not the workdir of a run and has no update 3"):
        open_weights(str(folder), "--workdir", step=3)
    run = prepare(config(photographs, folder / "model.safetensors"), tmp_path)
    assert f"initial weights: {folder / 'model.safetensors'}; " in run.start.describe()


@pytest.mark.long
def test_another_number_of_classes(
    folder: pathlib.Path, photographs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    other = config(
        photographs,
        folder,
        data__options__num_classes=7,
        model__num_classes=7,
        task__input_mean=(127.5,) * 3,
        init__new_parameters="^output/",
    )
    run = prepare(other, tmp_path)
    assert run.start.describe().endswith(
        "100 arrays taken; new, at random: output/bias, output/kernel; optimizer state new; "
        f"the weights were trained with config.task.input_mean={MEAN}, but this run has (127.5, 127.5, 127.5)"
    )
    expected = from_timm("resnet18", folder / "model.safetensors")["params"]
    actual = run.first_state().params
    assert actual["output"]["kernel"].shape == (512, 7)
    assert 0.005 < np.std(actual.pop("output")["kernel"]) < 0.02
    expected.pop("output")
    tiny.assert_equal(actual, expected)
    with pytest.raises(
        UserError,
        match="lacks 2 of the model's arrays, such as output/bias, which would be random;",
    ):
        evaluate_weights(other)


@pytest.mark.long
def test_they_are_evaluated_where_no_run_is(
    folder: pathlib.Path, photographs: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    settings = config(photographs, folder, data__train_split="train", ema__decay=0.9)
    actual = evaluate_weights(settings)
    output = tiny.unbroken(capsys.readouterr().err)
    assert output.startswith(f"initial weights: {folder}; 102 arrays taken")
    paths = sorted((photographs / "val").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths]).astype(np.float32)
    labels = np.array(["abcde".index(path.parent.name) for path in paths])
    model = models.build("resnet18", num_classes=CLASSES)
    variables = from_timm("resnet18", tensors())
    images = (pixels - np.float32(MEAN)) / np.float32(DEVIATION)
    logits, _ = jax.jit(lambda v, x: model.apply(v, x, train=False))(variables, images)
    logits = np.float64(logits)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    assert actual.keys() == {"accuracy", "loss"}
    assert actual["accuracy"] == np.mean(logits.argmax(1) == labels)
    assert actual["loss"] == pytest.approx(losses.mean(), rel=1e-4)
    assert np.std(losses) > 0.3  # images give different losses
    assert settings.data.train_split == "train"  # the config itself is not changed
    with pytest.raises(UserError, match="or config.data.options.num_classes=10 if"):
        evaluate_weights(tiny.change(settings, {"model.num_classes": 10}))


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Values:
        workdir, config, step, split = None, None, None, None

    asked: list[Any] = []
    monkeypatch.setattr(evaluate.cpu_devices, "make_from_flags", lambda: None)
    monkeypatch.setattr(evaluate.distributed, "initialize_from_flags", lambda: None)
    monkeypatch.setattr(evaluate.flags, "FLAGS", Values)
    for Values.config in (None, tiny.digits()):
        with pytest.raises(
            UserError, match="--workdir is missing; .* --config.init_from to evaluate"
        ):
            evaluate.main()
    monkeypatch.setattr(
        evaluate, "evaluate_weights", lambda *given: asked.append(given) or {"accuracy": 0.5}
    )
    Values.config, Values.split = tiny.digits(init_from="there"), "other"
    evaluate.main()
    assert asked == [(Values.config, "other")]
    assert capsys.readouterr().out == '{"accuracy": 0.5}\n'
    Values.step = "3"
    with pytest.raises(UserError, match="--step=3 needs the --workdir of a run; give --workdir"):
        evaluate.main()


def broken(folder: pathlib.Path, path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Copies a folder, with tensors replaced by `changes`; None removes a tensor."""
    replaced = {**tensors(), **changes}
    path.mkdir()
    safetensors_numpy.save_file(
        {name: tensor for name, tensor in replaced.items() if tensor is not None},
        path / "model.safetensors",
    )
    shutil.copy(folder / "config.json", path)
    return path


@pytest.mark.long
def test_rejected_weights(
    folder: pathlib.Path,
    photographs: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rejected(path: pathlib.Path, message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=r"^config\.init.*" + message) as error:
            prepare(config(photographs, path, **changes), tmp_path / "run")
        assert "\n" not in str(error.value)

    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # no run gets as far as compiling
    file = folder / "model.safetensors"
    rejected(
        folder,
        "of the model 'resnet18', but config.model.name is 'resnet34'; use the same",
        model__name="resnet34",
    )
    rejected(
        file,
        r"lacks 80 tensor\(s\): .*; the file is read as resnet34, because of config.model.name",
        model__name="resnet34",
    )
    rejected(
        file,
        "is a file without a config.json, which config.model.name='davidnet' needs; give a folder",
        model__name="davidnet",
    )
    rejected(
        folder,
        r"has output/bias of shape \(5,\), but this model needs \(7,\); .*_parameters, now '', match",
        model__num_classes=7,
        data__options__num_classes=7,
    )
    rejected(
        folder,
        r"has stem_conv/kernel of shape \(7, 7, 3, 64\), but this model needs \(3, 3, 3, 64\)",
        model__stem="cifar",
    )
    rejected(
        broken(folder, tmp_path / "less", **{"bn1.bias": None}),
        "less/model.safetensors lacks "
        r"1 tensor\(s\): bn1.bias",
    )
    rejected(
        broken(folder, tmp_path / "more", **{"layer5.bias": np.zeros(1)}),
        r"also has 1 tensor\(s\): layer5.bias",
    )
    cut = broken(folder, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(file.read_bytes()[:-5])
    rejected(cut.parent, "cut/model.safetensors is not a complete safetensors file")
    rejected(cut, "cut/model.safetensors is not a complete safetensors file")
    (cut.parent / "config.json").write_text(json.dumps(TIMM | {"architecture": "resnet50d"}))
    rejected(cut.parent, "timm's network 'resnet50d' cannot be read; use ")
    cut.rename(cut.parent / "pytorch_model.bin")
    pickle = re.escape(str(cut.parent / "pytorch_model.bin"))
    for path in (cut.parent, cut.parent / "pytorch_model.bin"):
        rejected(path, f"{pickle} is a PyTorch pickle, .*torch.load.'pytorch_model.bin', ")
    rejected(
        folder,
        "'keep' needs an optimizer state, which .* does not have",
        init__optimizer_state="keep",
    )
    assert not list((tmp_path / "run").rglob("*.*"))
