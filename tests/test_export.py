"""Tests exports of a BERT for Hugging Face, and of image networks for timm."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import export as export_lib
from lamb_tpu import models
from lamb_tpu.errors import UserError
from lamb_tpu.export import export
from lamb_tpu.models.bert import from_huggingface
from lamb_tpu.models.convert import from_timm
from lamb_tpu.predict import predict
from lamb_tpu.run.weights import Weights, open_weights
from tests import tiny
from tests.data.images.photographs import encode, smooth
from tests.raising import rejected

TEXT = "The [MASK] is of [MASK]."


def test_exported_bert_predicts_the_same(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "made" / "of"
    assert export(pretrained, folder) == f"{pretrained}, update 2 is written to {folder}"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "vocab.txt",
        "tokenizer_config.json",
    }
    assert json.loads((folder / "tokenizer_config.json").read_text())["do_lower_case"] is True
    # All files have the same permissions.
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert predict(str(folder), TEXT) == predict(str(pretrained), TEXT)
    tiny.assert_equal(from_huggingface(folder)[1], tiny.restored(tiny.bert(), pretrained)[0].params)


def test_export_does_not_overwrite(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    export(pretrained, tmp_path / "out")
    before = tiny.fingerprint(tmp_path / "out")
    with rejected("*out", problem="is not empty", remedy="give a new or empty folder"):
        export(pretrained, tmp_path / "out", 1)
    assert tiny.fingerprint(tmp_path / "out") == before
    newest = from_huggingface(tmp_path / "out")[1]
    (tmp_path / "first").mkdir()
    done = tiny.command(
        "lamb_tpu.export", f"--workdir={pretrained}", f"--output={tmp_path / 'first'}", "--step=1"
    )
    assert done.returncode == 0 and "update 1 is written to" in done.stdout, done.stderr
    actual = from_huggingface(tmp_path / "first")[1]
    tiny.assert_equal(actual, open_weights(str(pretrained), "--workdir", 1).params())
    with pytest.raises(AssertionError):
        tiny.assert_equal(actual, newest)


def test_a_run_that_has_not_ended_needs_a_flag(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "12")
    problem = "is a run that has not ended (update 8 of 12)"
    with rejected(f"--workdir {copy}, update 8,", problem=problem, remedy="or give --unfinished"):
        export(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # After this check, the run is rejected because no other library has its network.
    for options in ({"unfinished": True}, {"step": 8}):
        with rejected("*", problem="has the model 'mlp'"):
            export(copy, tmp_path / "out", **options)


@pytest.mark.long
def test_stacked_layers_and_a_cased_vocabulary(tmp_path: pathlib.Path) -> None:
    tiny.save(tiny.bert(model__scan_layers=True), tmp_path / "run")
    (tmp_path / "run" / "text.json").write_text('{"cased": true}')
    export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": False,
    }
    for actual, expected in zip(
        *(predict(str(tmp_path / name), TEXT) for name in ("out", "run")), strict=True
    ):
        assert [word.word for word in actual] == [word.word for word in expected]
        assert [w.probability for w in actual] == pytest.approx([w.probability for w in expected])
    written = from_huggingface(tmp_path / "out")[1]["encoder"]
    params = open_weights(str(tmp_path / "run"), "--workdir").params()
    stacked = params["encoder"]["layers"]
    for index in (0, 1):
        tiny.assert_equal(written[f"layer_{index}"], jax.tree.map(lambda x: x[index], stacked))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Writes a folder with eight images of two classes."""
    path = tmp_path_factory.mktemp("pictures")
    for index in range(8):
        file = path / "train" / "ab"[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode(smooth(40, 40, index), "png"))
    return path


def of_pictures(photographs: pathlib.Path, **changes: object) -> ConfigDict:
    fields = {
        "data__name": "image_folder",
        "data__dir": str(photographs),
        "data__train_split": "train",
        "data__eval_split": "train",
        "batch_size": 8,
        "data__options": ConfigDict({"size": 32, "resize": "bicubic", "central_fraction": 0.0}),
        "model": ConfigDict({"name": "resnet18", "num_classes": 2, "momentum": 0.8}),
        "task": ConfigDict(
            {"name": "classification", "input_mean": (127.5, 102.0, 51.0), "input_std": 51.0}
        ),
    }
    return tiny.digits(**fields | changes)


@pytest.mark.long
def test_image_network_in_timm_layout(photographs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tiny.save(of_pictures(photographs), tmp_path / "run")
    printed = export(tmp_path / "run", tmp_path / "out")
    assert printed == f"{tmp_path / 'run'}, update 2 is written to {tmp_path / 'out'}"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architecture": "resnet18",
        "num_classes": 2,
        "pretrained_cfg": {
            "num_classes": 2,
            "mean": [0.5, 0.4, 0.2],
            "std": [0.2, 0.2, 0.2],
            "input_size": [3, 32, 32],
            "interpolation": "bicubic",
            "crop_pct": 0.5,
        },
    }
    expected = open_weights(str(tmp_path / "run"), "--workdir").variables()
    assert set(expected) == {"params", "batch_stats"}
    tiny.assert_equal(from_timm("resnet18", tmp_path / "out" / "model.safetensors"), expected)
    # The exported folder can be read like other timm folders, and exported again unchanged.
    again = open_weights(str(tmp_path / "out"), "--workdir")
    assert again.pixels == ((127.5, 102.0, 51.0), (51.0, 51.0, 51.0))
    tiny.assert_equal(again.variables(), expected)
    export(tmp_path / "out", tmp_path / "again")
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"stem": "cifar"},
            "config.model.stem='cifar' differs from timm's resnet18; export a run with 'imagenet'",
        ),
        (
            {"epsilon": 1e-3},
            "config.model.epsilon=0.001 differs from timm's resnet18; export a run with 1e-05",
        ),
        (
            {"name": "efficientnet_b0", "stages": [[1, 3, 1, 1, 16]]},
            r"config.model.stages=\[\[1, 3, 1, 1, 16\]\] differs from timm's tf_efficientnet_b0",
        ),
        # A network for greyscale images.
        (
            {},
            r"--workdir .* not those of resnet18: params/stem_conv/kernel is of shape "
            r"\(7, 7, 1, 64\), but of shape \(7, 7, 3, 64\)",
        ),
    ],
)
def test_networks_that_timm_does_not_have(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fields: dict, message: str
) -> None:
    model = {"name": "resnet18", "num_classes": 10, "dtype": "bfloat16"} | fields
    image = jax.ShapeDtypeStruct((1, 32, 32, 1), np.float32)
    variables = jax.eval_shape(
        models.build("resnet18", num_classes=10).init, jax.random.key(0), image
    )
    shapes = {
        "params": variables["params"],
        "model_state": {"batch_stats": variables["batch_stats"]},
    }
    weights = Weights(tmp_path, 7, model, shapes, 0, lambda wanted: wanted)
    monkeypatch.setattr(export_lib, "open_weights", lambda *_: weights)
    with pytest.raises(UserError, match=message):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_errors(pretrained: pathlib.Path, trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    for workdir, output, step, message in [
        (trained, tmp_path / "out", None, f"--workdir {trained} has the model 'mlp', which cannot"),
        (pretrained, pretrained, None, f"--output {pretrained} is not empty; give a new or emp"),
        (pretrained, tmp_path / "full", None, "--output .*/full is not empty"),
        (pretrained, tmp_path / "full" / "config.json", None, "config.json is a file; give a fold"),
        (pretrained, tmp_path / "out", 7, "has no checkpoint of update 7; use one of 1, 2"),
        (tmp_path, tmp_path / "out", None, f"--workdir {tmp_path} holds no run"),
        (pretrained, pathlib.Path("/proc/out"), None, r"/proc/out cannot be written \(.*No such"),
    ]:
        with pytest.raises(UserError, match=message):
            export(workdir, output, step)
    assert not (tmp_path / "out").exists()
