"""The vocabulary in a folder of weights, from this project or from Hugging Face."""

import os
import pathlib

import pytest

from lamb_tpu.data.text import saved
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.raising import rejected

VOCABULARY = Vocabulary([*SPECIAL_TOKENS, "a", "é"])


@pytest.mark.parametrize("cased", [False, True])
def test_saved_is_read_again(tmp_path: pathlib.Path, cased: bool) -> None:
    saved.save(tmp_path, VOCABULARY, cased)
    for path in (tmp_path, tmp_path / "vocab.txt", str(tmp_path)):
        actual, output = saved.read(path)
        assert actual.tokens == VOCABULARY.tokens and output is cased


@pytest.mark.parametrize(
    "content, cased",
    [
        (None, None),
        ('{"do_lower_case": false}', True),
        ('{"do_lower_case": true}', False),
        ("{}", False),  # the default of transformers' BertTokenizer
    ],
)
def test_hugging_face(tmp_path: pathlib.Path, content: str | None, cased: bool | None) -> None:
    VOCABULARY.write(tmp_path / "vocab.txt")
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    assert saved.read(tmp_path)[1] is cased


@pytest.mark.parametrize(
    "name, content",
    [
        ("text.json", "{"),
        ("text.json", "{}"),
        ("text.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"do_lower_case": [false]}'),
        ("text.json", '{"cased": 5}'),
        ("text.json", "[" * 100_000),
    ],
)
def test_unreadable_files(tmp_path: pathlib.Path, name: str, content: str) -> None:
    VOCABULARY.write(tmp_path / "vocab.txt")
    (tmp_path / name).write_text(content)
    with rejected(tmp_path / name, ..., "does not say whether vocab.txt keeps case"):
        saved.read(tmp_path)


def test_a_pipe_beside_the_vocabulary(tmp_path: pathlib.Path) -> None:
    VOCABULARY.write(tmp_path / "vocab.txt")
    os.mkfifo(tmp_path / "text.json")
    with rejected("*/text.json", ..., "does not say whether vocab.txt keeps"):
        saved.read(tmp_path)


def test_no_vocabulary(tmp_path: pathlib.Path) -> None:
    with rejected("*/vocab.txt", ..., "cannot be read (No such file or", "give another file"):
        saved.read(tmp_path)
