"""Vocabularies: BERT's, and files that are not vocabularies."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.raising import rejected
from tests.shared import shared
from tests.tiny import ROOT


def test_the_vocabulary_of_bert(vocabulary: Vocabulary) -> None:
    assert len(vocabulary) == 30_522
    names = ("pad", "unknown", "cls", "sep", "mask")
    ids = [getattr(vocabulary, f"{name}_id") for name in names]
    assert ids == [0, 100, 101, 102, 103]
    assert vocabulary.continues.sum() == 5_828  # `grep -c '^##'`
    assert not vocabulary.continues[vocabulary.ids["a"]]


def test_written_is_read_again(tmp_path: pathlib.Path, vocabulary: Vocabulary) -> None:
    vocabulary.write(tmp_path / "vocab.txt")
    original = shared("data", "bert_vocab", "vocab.txt").read_bytes()
    assert (tmp_path / "vocab.txt").read_bytes() == original


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a\nb\n", ("*/vocab.txt", ..., "is not a vocabulary of BERT: it has no")),
        (
            "\n".join([*SPECIAL_TOKENS, "a", "b", "a"]).encode(),
            ("*/vocab.txt", ..., "has the token 'a' twice", "remove one of them"),
        ),
        (b"\xff\xfe", ("*/vocab.txt", ..., "cannot be read (line 1 is not UTF-8")),
        (None, ("*/vocab.txt", ..., "cannot be read (No such file or directory)")),
    ],
)
def test_bad_files(tmp_path: pathlib.Path, content: bytes | None, message: tuple[Any, ...]) -> None:
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with rejected(*message) as caught:
        Vocabulary.read(path)
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_is_no_token(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_bytes("\ufeff[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n[MASK]\r\nword\r\n".encode())
    assert Vocabulary.read(file).tokens == [*SPECIAL_TOKENS, "word"]


def test_training_needs_no_tokenizer() -> None:
    code = "import sys, lamb_tpu.data.text.masked_lm; print('tokenizers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
