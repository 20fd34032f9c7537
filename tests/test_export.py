"""A run's BERT as a folder of Hugging Face's."""

import json
import pathlib

import jax
import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.export import export
from lamb_tpu.models.bert import from_huggingface
from lamb_tpu.predict import predict
from lamb_tpu.weights import open_weights
from tests import tiny

TEXT = "The [MASK] is of [MASK]."


def test_what_is_written_predicts_the_same(
    pretrained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "made" / "of"
    assert export(pretrained, folder) == f"{pretrained}, update 2 is written to {folder}"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json",
    }
    assert json.loads((folder / "tokenizer_config.json").read_text())["do_lower_case"] is True
    # Who may read one of them may read all.
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert predict(str(folder), TEXT) == predict(str(pretrained), TEXT)
    tiny.assert_equal(from_huggingface(folder)[1], tiny.restored(tiny.bert(), pretrained)[0].params)


def test_another_checkpoint_does_not_take_the_place_of_the_first(
    pretrained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    export(pretrained, tmp_path / "out")
    before = tiny.fingerprint(tmp_path / "out")
    with pytest.raises(UserError, match="out holds something already; give a new or empty folder"):
        export(pretrained, tmp_path / "out", 1)
    assert tiny.fingerprint(tmp_path / "out") == before
    newest = from_huggingface(tmp_path / "out")[1]
    (tmp_path / "first").mkdir()
    done = tiny.command(
        "lamb_tpu.export", f"--workdir={pretrained}", f"--output={tmp_path / 'first'}", "--step=1"
    )
    assert done.returncode == 0 and "update 1 is written to" in done.stdout, done.stderr
    found = from_huggingface(tmp_path / "first")[1]
    tiny.assert_equal(found, open_weights(str(pretrained), "--workdir", 1).params())
    with pytest.raises(AssertionError):
        tiny.assert_equal(found, newest)


def test_stacked_layers_and_a_cased_vocabulary(tmp_path: pathlib.Path) -> None:
    tiny.save(tiny.bert(model__scan_layers=True), tmp_path / "run")
    (tmp_path / "run" / "text.json").write_text('{"cased": true}')
    export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "BertTokenizer", "do_lower_case": False,
    }
    for found, expected in zip(
        *(predict(str(tmp_path / name), TEXT) for name in ("out", "run")), strict=True
    ):
        assert [word.word for word in found] == [word.word for word in expected]
        assert [w.probability for w in found] == pytest.approx([w.probability for w in expected])
    written = from_huggingface(tmp_path / "out")[1]["encoder"]
    params = open_weights(str(tmp_path / "run"), "--workdir").params()
    stacked = params["encoder"]["layers"]
    for index in (0, 1):
        tiny.assert_equal(written[f"layer_{index}"], jax.tree.map(lambda x: x[index], stacked))


def test_mistakes(
    pretrained: pathlib.Path, trained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    for workdir, output, step, message in [
        (trained, tmp_path / "out", None, f"--workdir {trained} has the model 'mlp'; only 'bert'"),
        (pretrained, pretrained, None, f"--output {pretrained} holds something already; give a"),
        (pretrained, tmp_path / "full", None, "--output .*/full holds something already"),
        (pretrained, tmp_path / "full" / "config.json", None, "config.json is a file; give a fold"),
        (pretrained, tmp_path / "out", 7, "has no checkpoint of update 7; it has: 1, 2"),
        (tmp_path, tmp_path / "out", None, f"--workdir {tmp_path} holds no run"),
        (pretrained, pathlib.Path("/proc/out"), None, r"/proc/out cannot be written \(.*No such"),
    ]:
        with pytest.raises(UserError, match=message):
            export(workdir, output, step)
    assert not (tmp_path / "out").exists()
