"""Weights of a run and of a Hugging Face folder: the same arrays with the same paths."""

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
from tests.raising import rejected


def params_of(workdir: pathlib.Path) -> Any:
    return tiny.restored(tiny.digits(), workdir)[0].params


def test_weights_of_a_run(trained: pathlib.Path) -> None:
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


def test_arrays_have_the_requested_shardings(trained: pathlib.Path) -> None:
    split = NamedSharding(mesh_lib.make_mesh({"data": -1}), PartitionSpec("data"))
    wanted = {
        "opt_state": {
            "mu": {
                "hidden0": {"kernel": jax.ShapeDtypeStruct((64, 16), jnp.bfloat16, sharding=split)}
            }
        }
    }
    actual = open_weights(str(trained), "--checkpoint").read(wanted)
    (leaf,) = jax.tree.leaves(actual)
    assert leaf.sharding == split and leaf.dtype == jnp.bfloat16
    expected = tiny.restored(tiny.digits(), trained)[0].opt_state.mu["hidden0"]["kernel"]
    np.testing.assert_array_equal(leaf, expected.astype(jnp.bfloat16))


def test_weights_of_hugging_face(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    of_run = open_weights(str(pretrained), "--checkpoint")
    to_huggingface(of_run.bert(), of_run.params(), tmp_path)
    weights = open_weights(str(tmp_path), "--checkpoint")
    assert (weights.step, set(weights.shapes), weights.text()) == (None, {"params"}, None)
    assert weights.describe() == str(tmp_path)
    assert weights.bert() == of_run.bert()
    tiny.assert_equal(weights.params(), of_run.params())
    vocabulary, cased = of_run.text()
    assert len(vocabulary) == 512 and cased is False
    with rejected(f"--checkpoint {tmp_path}", problem="is not the workdir of a run and has no upd"):
        open_weights(str(tmp_path), "--checkpoint", step=3)


def test_parameters_of_a_run_that_diverged(
    trained: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = Checkpoints.restore_part

    def diverged(self: Checkpoints, step: int, wanted: Any) -> dict[str, Any]:
        actual = restore(self, step, wanted)
        actual["params"]["hidden0"]["kernel"] *= jnp.nan
        return actual

    monkeypatch.setattr(Checkpoints, "restore_part", diverged)
    problem = "has NaN or infinity in 1 array(s): params/hidden0/kernel"
    with rejected(f"--checkpoint {trained}, update 12,", problem=problem):
        open_weights(str(trained), "--checkpoint").params()


def test_shards_of_an_encoder_alone(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    of_run = open_weights(str(pretrained), "--checkpoint")
    to_huggingface(of_run.bert(), of_run.params(), tmp_path)
    actual = load_file(tmp_path / "model.safetensors")
    encoder = {
        name.removeprefix("bert."): tensor
        for name, tensor in actual.items()
        if name.startswith("bert.")
    }
    save_file(encoder, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(encoder, "model-00001-of-00001.safetensors")})
    )
    (tmp_path / "model.safetensors").unlink()
    weights = open_weights(str(tmp_path), "--checkpoint")
    assert weights.bert().heads == () and set(weights.params()) == {"embeddings", "encoder"}


def test_vocabulary_of_unknown_case(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(pretrained, tmp_path / "copy"))
    (folder / "text.json").write_text('{"cased": true}')
    assert open_weights(str(folder), "--checkpoint").text()[1] is True
    (folder / "text.json").unlink()
    assert open_weights(str(folder), "--checkpoint").text()[1] is None


def test_damaged_newest_checkpoint_is_skipped(copy: pathlib.Path) -> None:
    for step, file in ((12, "state/_METADATA"), (8, "sha256.json")):
        (copy / "checkpoints" / str(step) / file).unlink()
    output: list[str] = []
    assert open_weights(str(copy), "--checkpoint", report=output.append).step == 4
    assert [f"update {step} in" in text for step, text in zip((12, 8), output, strict=True)]
    with rejected(
        f"the checkpoint of update 8 in {copy / 'checkpoints'}", problem="cannot be read"
    ):
        open_weights(str(copy), "--checkpoint", step=8)
    (copy / "checkpoints" / "4" / "sha256.json").unlink()
    with rejected(f"none of the checkpoints [4, 8, 12] in {copy / 'checkpoints'}"):
        open_weights(str(copy), "--checkpoint", report=output.append)


def test_folders_without_weights(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def check(folder: pathlib.Path, message: str) -> None:
        before = tiny.fingerprint(folder)
        with pytest.raises(UserError, match=message) as error:
            open_weights(str(folder), "config.init_from")
        assert "config.init_from" in str(error.value)
        assert tiny.fingerprint(folder) == before

    check(tmp_path / "none", "='.*none' does not exist; give .* model.safetensors")
    check(tmp_path, f"config.init_from {tmp_path} holds no run: config.json is missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    check(tmp_path, "holds neither a run nor model.safetensors: its config.json is not that of")
    (tmp_path / "config.json").write_text((trained / "config.json").read_text())
    check(tmp_path, f"config.init_from {tmp_path} has no checkpoint yet")
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "config.json").write_text("{")
    check(tmp_path, "config.json is damaged .* give another config.init_from")
    with rejected("*", problem="has no checkpoint of update 5", remedy="use one of 4, 8, 12"):
        open_weights(str(trained), "config.init_from", step=5)


def test_last_phase_with_a_checkpoint(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    phases = {f"phases.{name}.seed": 1 for name in ("a", "b", "c")}
    (tmp_path / "config.json").write_text(json.dumps(config | phases))
    with rejected(f"--checkpoint {tmp_path}", problem="has no checkpoint yet"):
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
