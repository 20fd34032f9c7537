"""libtpu's output without a TPU; tests/test_readme.py runs a snippet too."""

import os

import pytest

from lamb_tpu.optim.quiet import hush_libtpu

NAMES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_LOG_DIR")


def test_variables_of_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "x")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    hush_libtpu()  # JAX has found a TPU
    assert not set(NAMES) & set(os.environ)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "the user's")
    hush_libtpu()
    assert [os.environ[name] for name in NAMES] == ["v3-8", "the user's", "disabled"]
