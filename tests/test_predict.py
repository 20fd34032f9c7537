"""Words for the gaps of a text, from a run's checkpoint and from a Hugging Face folder."""

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.models.bert import BertConfig
from lamb_tpu.predict import Word, describe, encode, predict
from tests import tiny

TEXT = "The [MASK] is of [MASK]."


def edited(pretrained: pathlib.Path, folder: pathlib.Path, **model: Any) -> pathlib.Path:
    """A copy, of which config.json says something else of the model."""
    copy = pathlib.Path(shutil.copytree(pretrained, folder))
    config = json.loads((copy / "config.json").read_text())
    config |= {f"model.{name}": value for name, value in model.items()}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.long
def test_words_and_probabilities(pretrained: pathlib.Path) -> None:
    vocabulary = Vocabulary.read(pretrained / "vocab.txt")
    words = ["[CLS]", "the", "[MASK]", "is", "of", "[MASK]", ".", "[SEP]"]
    ids = np.array([[vocabulary.tokens.index(word) for word in words]])
    np.testing.assert_array_equal(encode(TEXT, vocabulary, False), ids[0])

    config = tiny.bert()
    model = config.model.to_dict()
    del model["name"]
    params = tiny.restored(config, pretrained)[0].params
    inputs = {
        "input_ids": ids,
        "token_type_ids": np.zeros_like(ids),
        "attention_mask": np.ones_like(ids),
    }
    outputs = BertConfig(**model).module().apply({"params": params}, inputs, train=False)
    scores = np.exp(np.asarray(outputs["mlm_logits"][0, [2, 5]], np.float64))
    expected = scores / scores.sum(-1, keepdims=True)

    found = predict(str(pretrained), TEXT, top=7)
    assert [len(words) for words in found] == [7, 7]
    for row, words in zip(expected, found, strict=True):
        best = np.sort(row)[::-1][:7]
        np.testing.assert_allclose([word.probability for word in words], best, rtol=1e-4)
        indices = [vocabulary.tokens.index(word.word) for word in words]
        np.testing.assert_allclose(row[indices], best, rtol=1e-4)
    assert [len(words) for words in predict(str(pretrained), TEXT, top=10_000)] == [512, 512]


def test_case_is_kept_where_the_vocabulary_does(pretrained: pathlib.Path) -> None:
    vocabulary = Vocabulary.read(pretrained / "vocab.txt")
    assert vocabulary.tokens[encode("The", vocabulary, False)[1]] == "the"
    assert vocabulary.unknown_id == encode("The", vocabulary, True)[1]


def test_table() -> None:
    gaps = [[("dog", 0.5), ("##gy", 0.051)], [("a", 1.0)]]
    words = [[Word(*item) for item in gap] for gap in gaps]
    assert describe("The [MASK] of [MASK]", words).splitlines() == [
        "The [MASK] of [MASK]",
        "[MASK] 1  dog    50.0%",
        "          ##gy    5.1%",
        "[MASK] 2  a     100.0%",
    ]
    assert describe("[MASK]", words[1:]).splitlines()[1] == "[MASK]    a  100.0%"


@pytest.mark.long
def test_command_line(pretrained: pathlib.Path) -> None:
    done = tiny.command(
        "lamb_tpu.predict", f"--checkpoint={pretrained}", f"--text={TEXT}", "--top=2", "--json"
    )
    assert done.returncode == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    expected = predict(str(pretrained), TEXT, top=2)
    assert found["text"] == TEXT
    for ours, theirs in zip(expected, found["gaps"], strict=True):
        assert [word.word for word in ours] == [word["word"] for word in theirs]
        assert theirs[0]["probability"] == pytest.approx(ours[0].probability, rel=1e-4)


def test_mistakes(
    pretrained: pathlib.Path,
    trained: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    long = " ".join(["the"] * 30) + " [MASK]"  # with [CLS] and [SEP] one too many
    for folder, text, message in [
        (pretrained, "no gap", r"--text has no \[MASK\]; write it where"),
        (pretrained, "", r"--text has no \[MASK\]"),
        (pretrained, long, r"--text has 33 tokens with .*, the network takes at most 32"),
        (trained, TEXT, f"--checkpoint {trained} is no BERT; only one with the head 'mlm'"),
        (tmp_path, TEXT, f"--checkpoint {tmp_path} holds no run"),
        (edited(pretrained, tmp_path / "heads", heads=["nsp"]), TEXT, r"heads \('nsp',\); only"),
        (
            edited(pretrained, tmp_path / "size", vocab_size=600),
            TEXT,
            "vocab.txt has 512 words, the network 600; put the network's own there",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            predict(str(folder), text)
    with pytest.raises(UserError, match="--top is 0; it must be at least 1"):
        predict(str(pretrained), TEXT, top=0)
    without = edited(pretrained, tmp_path / "without")
    (without / "vocab.txt").unlink()
    with pytest.raises(UserError, match=f"{without} has no vocab.txt; put the network's there"):
        predict(str(without), TEXT)
