"""Weights of a run and of a Hugging Face folder: the same arrays by the same paths."""

import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from lamb_tpu.errors import UserError
from lamb_tpu.models.bert import to_huggingface
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.run.weights import open_weights
from lamb_tpu.store.checkpoint import Checkpoints
from tests import tiny


def params_of(workdir: pathlib.Path) -> Any:
    return tiny.restored(tiny.digits(), workdir)[0].params


def test_those_of_a_run(trained: pathlib.Path) -> None:
    weights = open_weights(str(trained), "--checkpoint")
    assert weights.step == 12 and weights.updates_before == 0 and weights.text() is None
    assert weights.model == {"name": "mlp", "hidden_sizes": [16]} and weights.bert() is None
    assert weights.describe() == f"{trained}, update 12"
    assert set(weights.shapes) == {"params", "opt_state"}
    kernel = weights.shapes["params"]["hidden0"]["kernel"]
    assert (kernel.shape, kernel.dtype) == ((64, 16), np.float32)
    assert weights.shapes["opt_state"]["count"].dtype == np.int32
    tiny.assert_equal(weights.params(), params_of(trained))
    assert open_weights(str(trained), "--checkpoint", step=8).step == 8


def test_a_part_is_placed_as_asked(trained: pathlib.Path) -> None:
    split = NamedSharding(mesh_lib.make_mesh({"data": -1}), PartitionSpec("data"))
    wanted = {
        "opt_state": {
            "mu": {
                "hidden0": {"kernel": jax.ShapeDtypeStruct((64, 16), jnp.bfloat16, sharding=split)}
            }
        }
    }
    found = open_weights(str(trained), "--checkpoint").read(wanted)
    (leaf,) = jax.tree.leaves(found)
    assert leaf.sharding == split and leaf.dtype == jnp.bfloat16
    expected = tiny.restored(tiny.digits(), trained)[0].opt_state.mu["hidden0"]["kernel"]
    np.testing.assert_array_equal(leaf, expected.astype(jnp.bfloat16))


def test_those_of_hugging_face(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    of_run = open_weights(str(pretrained), "--checkpoint")
    to_huggingface(of_run.bert(), of_run.params(), tmp_path)
    weights = open_weights(str(tmp_path), "--checkpoint")
    assert (weights.step, set(weights.shapes), weights.text()) == (None, {"params"}, None)
    assert weights.describe() == str(tmp_path)
    assert weights.bert() == of_run.bert()
    tiny.assert_equal(weights.params(), of_run.params())
    vocabulary, cased = of_run.text()
    assert len(vocabulary) == 512 and cased is False
    with pytest.raises(UserError, match=f"--checkpoint {tmp_path} is no run's, so .* no update 3"):
        open_weights(str(tmp_path), "--checkpoint", step=3)


def test_parameters_of_a_run_that_diverged(
    trained: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = Checkpoints.restore_part

    def diverged(self: Checkpoints, step: int, wanted: Any) -> dict[str, Any]:
        found = restore(self, step, wanted)
        found["params"]["hidden0"]["kernel"] *= jnp.nan
        return found

    monkeypatch.setattr(Checkpoints, "restore_part", diverged)
    with pytest.raises(
        UserError,
        match=(
            f"--checkpoint {trained}, update 12, has values that are not finite .* in 1 array.s.: "
            "params/hidden0/kernel; use weights from before"
        ),
    ):
        open_weights(str(trained), "--checkpoint").params()


def test_shards_of_an_encoder_alone(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    of_run = open_weights(str(pretrained), "--checkpoint")
    to_huggingface(of_run.bert(), of_run.params(), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    encoder = {
        name.removeprefix("bert."): tensor
        for name, tensor in found.items()
        if name.startswith("bert.")
    }
    save_file(encoder, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(encoder, "model-00001-of-00001.safetensors")})
    )
    (tmp_path / "model.safetensors").unlink()
    weights = open_weights(str(tmp_path), "--checkpoint")
    assert weights.bert().heads == () and set(weights.params()) == {"embeddings", "encoder"}


def test_vocabulary_without_a_word_about_case(
    pretrained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = pathlib.Path(shutil.copytree(pretrained, tmp_path / "copy"))
    (folder / "text.json").write_text('{"cased": true}')
    assert open_weights(str(folder), "--checkpoint").text()[1] is True
    (folder / "text.json").unlink()
    assert open_weights(str(folder), "--checkpoint").text()[1] is None


def test_damaged_newest_is_passed_over(copy: pathlib.Path) -> None:
    for step, file in ((12, "state/_METADATA"), (8, "sha256.json")):
        (copy / "checkpoints" / str(step) / file).unlink()
    told: list[str] = []
    assert open_weights(str(copy), "--checkpoint", report=told.append).step == 4
    assert [f"update {step} in" in text for step, text in zip((12, 8), told, strict=True)]
    with pytest.raises(UserError, match="checkpoint of update 8 .* cannot be read"):
        open_weights(str(copy), "--checkpoint", step=8)
    (copy / "checkpoints" / "4" / "sha256.json").unlink()
    with pytest.raises(UserError, match=r"none of the checkpoints \[4, 8, 12\] in .* can be read"):
        open_weights(str(copy), "--checkpoint", report=told.append)


def test_folders_without_weights(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def refused(folder: pathlib.Path, message: str, **options: Any) -> None:
        before = tiny.fingerprint(folder)
        with pytest.raises(UserError, match=message) as error:
            open_weights(str(folder), "config.init_from", **options)
        assert "config.init_from" in str(error.value)
        assert tiny.fingerprint(folder) == before

    refused(tmp_path / "none", "is '.*none', which is no folder; give .* model.safetensors")
    refused(tmp_path, f"config.init_from {tmp_path} holds no run: config.json is missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refused(tmp_path, "config.json is of something else, and model.safetensors is not there")
    (tmp_path / "config.json").write_text((trained / "config.json").read_text())
    refused(tmp_path, f"config.init_from {tmp_path} has no checkpoint yet")
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json is damaged .* give another config.init_from")
    with pytest.raises(UserError, match="has no checkpoint of update 5; it has: 4, 8, 12"):
        open_weights(str(trained), "config.init_from", step=5)


def test_last_phase_that_has_any(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    phases = {f"phases.{name}.seed": 1 for name in ("a", "b", "c")}
    (tmp_path / "config.json").write_text(json.dumps(config | phases))
    with pytest.raises(UserError, match=f"--checkpoint {tmp_path} has no checkpoint yet"):
        open_weights(str(tmp_path), "--checkpoint")
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / name)
    (tmp_path / "c").mkdir()
    weights = open_weights(str(tmp_path), "--checkpoint")
    assert weights.folder == tmp_path / "b"
    # The phase has ended, but not the run.
    assert weights.unfinished == "its phase c has no checkpoint yet"
    assert open_weights(str(tmp_path / "b"), "--checkpoint").unfinished == ""
    assert open_weights(str(tmp_path), "--checkpoint", step=8).unfinished == ""
