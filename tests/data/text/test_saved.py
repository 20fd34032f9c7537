"""The vocabulary of a folder of weights, ours or of Hugging Face."""

import pathlib

import pytest

from lamb_tpu.data.text import saved
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError

VOCABULARY = Vocabulary([*SPECIAL_TOKENS, "a", "é"])


@pytest.mark.parametrize("cased", [False, True])
def test_saved_is_read_again(tmp_path: pathlib.Path, cased: bool) -> None:
    saved.save(tmp_path, VOCABULARY, cased)
    for path in (tmp_path, tmp_path / "vocab.txt", str(tmp_path)):
        found, told = saved.read(path)
        assert found.tokens == VOCABULARY.tokens and told is cased


@pytest.mark.parametrize(
    "content, cased",
    [
        (None, None),
        ('{"do_lower_case": false}', True),
        ('{"do_lower_case": true}', False),
        ("{}", False),  # as transformers' BertTokenizer has it
    ],
)
def test_a_folder_of_hugging_face(
    tmp_path: pathlib.Path, content: str | None, cased: bool | None
) -> None:
    VOCABULARY.write(tmp_path / "vocab.txt")
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    assert saved.read(tmp_path)[1] is cased


@pytest.mark.parametrize(
    "name, content",
    [("text.json", "{"), ("text.json", "{}"), ("text.json", "[]"), ("tokenizer_config.json", "[]")],
)
def test_what_cannot_be_read(tmp_path: pathlib.Path, name: str, content: str) -> None:
    VOCABULARY.write(tmp_path / "vocab.txt")
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} cannot be read .* whether vocab.txt keeps case"):
        saved.read(tmp_path)


def test_no_vocabulary(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="vocab.txt cannot be read"):
        saved.read(tmp_path)
