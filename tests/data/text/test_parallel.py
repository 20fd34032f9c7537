"""Preparation of parallel text: reproducible files, interruptions, and damaged folders."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from lamb_tpu.data.text import grammar, parallel
from lamb_tpu.data.text.pairs import Multi30k, Pair
from lamb_tpu.data.text.subwords import to_text
from tests import tiny
from tests.raising import rejected
from tests.shared import shared


class Grammar:
    splits = grammar.SPLITS
    sums = {"train": "1", "test": "2"}

    def read(self, split: str) -> Iterator[Pair]:
        yield from grammar.read(split)


def sentences(tokens: parallel.Tokens) -> list[np.ndarray]:
    return np.split(tokens.ids, np.cumsum(tokens.lengths.ravel())[:-1])


def test_every_sentence_comes_back(tmp_path: pathlib.Path) -> None:
    prepared = parallel.prepare("grammar", Grammar(), 250, str(tmp_path))
    assert prepared.sizes == {"train": 1687, "test": 255} and len(prepared.vocabulary) == 250
    for split in grammar.SPLITS:
        tokens, pairs = prepared.open(split), list(grammar.read(split))
        actual = sentences(tokens)
        assert len(actual) == 2 * len(pairs) and tokens.ids.dtype == np.uint16
        assert all(ids[-1] == prepared.vocabulary.sep_id for ids in actual)
        texts = [to_text(ids, prepared.vocabulary) for ids in actual]
        assert list(zip(texts[::2], texts[1::2])) == pairs
        assert tokens.references() == [pair.target for pair in pairs]


def test_the_same_files_each_time(tmp_path: pathlib.Path) -> None:
    first = parallel.prepare("grammar", Grammar(), 250, str(tmp_path / "a"))
    again = parallel.prepare("grammar", Grammar(), 250, str(tmp_path / "b"))
    assert first.digest == again.digest
    assert tiny.fingerprint(tmp_path / "a") == tiny.fingerprint(tmp_path / "b")
    # The manifest has a checksum of every other file.
    folder = tmp_path / "a" / "lamb_tpu" / "grammar-250"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    sums = tiny.fingerprint(folder)
    del sums["manifest.json"]
    assert {name: item["sha256"] for name, item in files.items()} == sums


def test_interrupted_preparation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Grammar, split: str) -> Iterator[Pair]:
        if split == "test":
            raise KeyboardInterrupt
        yield from grammar.read(split)

    with monkeypatch.context() as patch:
        patch.setattr(Grammar, "read", killed)
        with pytest.raises(KeyboardInterrupt):
            parallel.prepare("grammar", Grammar(), 250, str(tmp_path))
    assert not (tmp_path / "lamb_tpu" / "grammar-250").exists()
    complete = parallel.prepare("grammar", Grammar(), 250, str(tmp_path))
    assert complete.sizes["test"] == 255
    monkeypatch.setattr(parallel, "_write", None)  # a complete folder is not prepared again
    assert parallel.prepare("grammar", Grammar(), 250, str(tmp_path)).digest == complete.digest


def test_damage_and_other_inputs_are_reported(tmp_path: pathlib.Path) -> None:
    parallel.prepare("grammar", Grammar(), 250, str(tmp_path))
    folder = tmp_path / "lamb_tpu" / "grammar-250"
    other = Grammar()
    other.sums = {"train": "3"}
    with rejected("*/grammar-250", ..., "was prepared with inputs={'train': '1',"):
        parallel.prepare("grammar", other, 250, str(tmp_path))
    content = (folder / "vocab.txt").read_text()
    (folder / "vocab.txt").write_text(content.replace("▁the", "▁eht"))
    with rejected("*/vocab.txt", ..., "has changed since it was prepared"):
        parallel.prepare("grammar", Grammar(), 250, str(tmp_path))
    (folder / "vocab.txt").write_text(content)
    (folder / "test.ids.npy").write_bytes(b"")
    with rejected("*/test.ids.npy", ..., "has changed since it was prepared"):
        parallel.prepare("grammar", Grammar(), 250, str(tmp_path))
    (folder / "manifest.json").write_text("{")
    with rejected("*/grammar-250", ..., "is damaged (JSONDecodeError: Expecting"):
        parallel.prepare("grammar", Grammar(), 250, str(tmp_path))


@pytest.mark.long
def test_multi30k(tmp_path: pathlib.Path) -> None:
    corpus = Multi30k(str(shared("data", "multi30k")))
    prepared = parallel.prepare("multi30k", corpus, 8000, str(tmp_path))
    assert len(prepared.vocabulary) == 8000
    tokens = prepared.open("test")
    texts = [to_text(ids, prepared.vocabulary) for ids in sentences(tokens)[1::2]]
    assert texts == [" ".join(text.split()) for text in tokens.references()]
