"""The real MNIST, prepared once for all tests of data."""

import pathlib

import pytest

from lamb_tpu import data
from lamb_tpu.data.builders import Cifar10
from tests.data import tiny_cifar
from tests.shared import shared


@pytest.fixture(scope="session")
def prepared_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A TFDS data folder that holds MNIST."""
    folder = str(tmp_path_factory.mktemp("prepared"))
    originals = str(shared("data", "mnist"))
    data.load("mnist", "test[:1]", data_dir=folder, source_dir=originals)
    return folder


@pytest.fixture
def cifar_dir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a tiny CIFAR-10 archive, whose checksum the builder expects."""
    folder = tmp_path / "originals"
    folder.mkdir()
    tiny_cifar.write(folder)
    monkeypatch.setattr(Cifar10, "url_infos", Cifar10.url_infos)
    tiny_cifar.expect(folder)
    return folder
