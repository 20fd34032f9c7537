"""The folder of a data set, and the commands that make the folder."""

import pathlib

import pytest

from lamb_tpu import data
from lamb_tpu.data import folders, prepare_text, registry
from lamb_tpu.data.builders import BUILDERS
from lamb_tpu.data.images import cifar10_jpeg
from lamb_tpu.errors import UserError


def test_a_set_is_described_as_its_reader_has_it(tmp_path: pathlib.Path) -> None:
    for name in registry.DATASETS:
        actual = folders.folder_of(name, "DIR")
        embedded = actual is None
        assert embedded == (name in ("digits", "grammar_de_en") or name.startswith("python_docs"))
        if actual is None:
            continue
        assert actual.downloaded == (name in BUILDERS), name
        if name not in BUILDERS and actual.key == "data.dir":
            # The reader raises an error if no folder is given.
            with pytest.raises((UserError, TypeError)):
                data.load(name, "train", source_dir=None)
    for name, builder in BUILDERS.items():
        holds = folders.folder_of(name, "DIR").holds
        assert all(
            info.filename in holds for info in builder(data_dir=str(tmp_path)).url_infos.values()
        )
    assert cifar10_jpeg.FILE in folders.folder_of("cifar10_jpeg", "DIR").holds
    assert folders.folder_of("my_module:Set", "DIR").holds == "the files of my_module:Set"


def test_sets_of_tfds_are_read_from_where_they_are_prepared() -> None:
    actual = folders.folder_of("imagenet2012", "DIR/imagenet")
    assert actual.key == "data.prepared_dir"
    ((python, flag, program),) = actual.commands
    assert (python, flag) == ("python", "-c")
    compile(program, "", "exec")
    assert '"imagenet2012", data_dir="DIR/imagenet"' in program
    assert '"ag_news"' in folders.folder_of("tfds:ag_news", "DIR").commands[0][2]


def test_commands_prepare_the_text(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TEXT", "HELD_OUT"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("The first sentence. And a second one.\n\n" * 40)
    actual = folders.folder_of("masked_lm", "text", vocab_size=60)
    assert actual.holds.endswith("a vocabulary of 60 tokens trained on train")
    for words in actual.commands:
        assert words[:3] == ("python", "-m", "lamb_tpu.prepare_text")
        assert prepare_text.main(words[3:]) == 0
    options = {"sequence_length": 32, "max_predictions": 5, "next_sentence": False}
    train, held_out = (
        data.load("masked_lm", split, source_dir=str(tmp_path / "text"), options=options)
        for split in ("train", "validation")
    )
    assert len(train) and train.vocabulary.tokens == held_out.vocabulary.tokens
    public = folders.folder_of("masked_lm", "DIR", ("books", "wiki"))
    assert "--vocab=vocab.txt" in public.commands[0] and "--output=DIR/wiki" in public.commands[1]
