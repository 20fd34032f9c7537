"""Vocabularies: BERT's own, and files that are none."""

import pathlib
import subprocess
import sys

import pytest

from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError
from tests.shared import shared
from tests.tiny import ROOT


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.read(shared("data", "bert_vocab", "vocab.txt"))


def test_the_vocabulary_of_bert(vocabulary: Vocabulary) -> None:
    ids = [
        vocabulary.pad_id,
        vocabulary.unknown_id,
        vocabulary.cls_id,
        vocabulary.sep_id,
        vocabulary.mask_id,
    ]
    assert len(vocabulary) == 30_522 and ids == [0, 100, 101, 102, 103]
    assert vocabulary.continues.sum() == 5_828  # `grep -c '^##'`
    assert not vocabulary.continues[vocabulary.ids["a"]]


def test_written_is_read_again(tmp_path: pathlib.Path, vocabulary: Vocabulary) -> None:
    vocabulary.write(tmp_path / "vocab.txt")
    original = shared("data", "bert_vocab", "vocab.txt").read_bytes()
    assert (tmp_path / "vocab.txt").read_bytes() == original


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a\nb\n", r"has no \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        ("\n".join([*SPECIAL_TOKENS, "a", "b", "a"]).encode(), "the token 'a' twice"),
        (b"\xff\xfe", "is not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_no_vocabulary(tmp_path: pathlib.Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
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
