"""Tests the words that a run's checkpoint predicts for the gaps in a text."""

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
from tests.raising import rejected

TEXT = "The [MASK] is of [MASK]."


def edited(pretrained: pathlib.Path, folder: pathlib.Path, **model: Any) -> pathlib.Path:
    """Returns a copy of a workdir with changes to the model in config.json."""
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

    actual = predict(str(pretrained), TEXT, top=7)
    assert [len(words) for words in actual] == [7, 7]
    for row, words in zip(expected, actual, strict=True):
        best = np.sort(row)[::-1][:7]
        np.testing.assert_allclose([word.probability for word in words], best, rtol=1e-4)
        indices = [vocabulary.tokens.index(word.word) for word in words]
        np.testing.assert_allclose(row[indices], best, rtol=1e-4)
    assert [len(words) for words in predict(str(pretrained), TEXT, top=10_000)] == [512, 512]


def test_case_follows_the_vocabulary(pretrained: pathlib.Path) -> None:
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
    actual = json.loads(done.stdout)
    expected = predict(str(pretrained), TEXT, top=2)
    assert actual["text"] == TEXT
    for ours, theirs in zip(expected, actual["gaps"], strict=True):
        assert [word.word for word in ours] == [word["word"] for word in theirs]
        assert theirs[0]["probability"] == pytest.approx(ours[0].probability, rel=1e-4)


def test_errors(
    pretrained: pathlib.Path,
    trained: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    long = " ".join(["the"] * 30) + " [MASK]"  # with [CLS] and [SEP], one token too many
    for folder, text, message in [
        (pretrained, "no gap", r"--text has no \[MASK\]; write it in place of a word"),
        (pretrained, "", r"--text has no \[MASK\]"),
        (
            pretrained,
            long,
            r"--text has 33 tokens, including .*; use at most 32, the limit of the network",
        ),
        (
            trained,
            TEXT,
            f"--checkpoint {trained} is not a BERT, .*; use a BERT with the head 'mlm'",
        ),
        (tmp_path, TEXT, f"--checkpoint {tmp_path} holds no run"),
        (edited(pretrained, tmp_path / "heads", heads=["nsp"]), TEXT, r"heads \('nsp',\), which"),
        (
            edited(pretrained, tmp_path / "size", vocab_size=600),
            TEXT,
            "vocab.txt has 512 words, but the network has 600; replace it with the network's vocab.txt",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            predict(str(folder), text)
    with rejected("--top", 0, "is out of range", "use at least 1"):
        predict(str(pretrained), TEXT, top=0)
    without = edited(pretrained, tmp_path / "without")
    (without / "vocab.txt").unlink()
    with rejected(
        f"*{without}", problem="has no vocab.txt", remedy="copy the network's vocab.txt into it"
    ):
        predict(str(without), TEXT)
