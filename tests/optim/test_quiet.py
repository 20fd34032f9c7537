"""Tests the environment variables that silence libtpu; tests/test_readme.py checks the output."""

import os

import pytest
from jax._src import xla_bridge

from lamb_tpu.optim.quiet import hush_libtpu

NAMES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_LOG_DIR")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str | None]]:
    """Returns the values of `NAMES` at each start of a fake libtpu."""
    values: list[list[str | None]] = []
    backend = xla_bridge.BackendRegistration(
        lambda: values.append([os.environ.get(name) for name in NAMES]), priority=1
    )
    monkeypatch.setattr(xla_bridge, "_backend_factories", {"tpu": backend})
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return values


def start() -> None:
    xla_bridge._backend_factories["tpu"].factory()


def test_variables_of_libtpu(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str | None]]
) -> None:
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    hush_libtpu()  # JAX has detected a TPU
    start()
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "the user's")
    hush_libtpu()
    hush_libtpu()
    before = dict(os.environ)
    start()
    assert started == [[None] * 3, ["v3-8", "the user's", "disabled"]]
    assert dict(os.environ) == before


def test_variables_are_restored_after_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str | None]]
) -> None:
    def fail() -> None:
        raise RuntimeError("there is no TPU")

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    xla_bridge._backend_factories["tpu"].factory = fail
    hush_libtpu()
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="there is no TPU"):
        start()
    assert dict(os.environ) == before


def test_a_jax_without_the_table_of_backends(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str | None]]
) -> None:
    monkeypatch.delattr(xla_bridge, "_backend_factories")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    hush_libtpu()
    assert not set(NAMES) & os.environ.keys()
