"""Fixtures of the launcher's tests: a cloud simulated in a local folder."""

import pathlib

import pytest

from lamb_tpu.launch import local_steps
from tests.launch.fakes import Cloud, checkout


@pytest.fixture(scope="module")
def module_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of `local_steps` in a small checkout, which tests use as lamb_tpu's checkout."""
    return str(checkout(tmp_path_factory.mktemp("checkout")))


@pytest.fixture
def hosts() -> int:
    return 1


@pytest.fixture
def cloud(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, module_file: str, hosts: int
) -> Cloud:
    actual = Cloud(tmp_path / "cloud", hosts)
    for name, value in actual.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local_steps, "__file__", module_file)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return actual
