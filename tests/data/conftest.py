"""Fixtures: the real MNIST, prepared once for all tests; BERT's vocabulary; a tiny CIFAR-10."""

import pathlib

import pytest

from lamb_tpu import data
from lamb_tpu.data.builders import Cifar10
from lamb_tpu.data.text.vocabulary import Vocabulary
from tests.data import tiny_cifar
from tests.shared import shared


@pytest.fixture(scope="session")
def prepared_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("prepared"))
    originals = str(shared("data", "mnist"))
    # With in_memory=False the set is prepared; otherwise the original files would be read directly.
    data.load("mnist", "test[:1]", data_dir=folder, source_dir=originals, in_memory=False)
    return folder


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary.read(shared("data", "bert_vocab", "vocab.txt"))


@pytest.fixture
def cifar_dir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a tiny CIFAR-10 archive, whose checksum the builder expects."""
    folder = tmp_path / "originals"
    folder.mkdir()
    tiny_cifar.write(folder)
    monkeypatch.setattr(Cifar10, "url_infos", Cifar10.url_infos)
    tiny_cifar.expect(folder)
    return folder
