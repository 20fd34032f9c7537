"""Tests environment variables that are set for a block."""

import os

import pytest

from lamb_tpu.environment import variables


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMB_TPU_A", "before")
    monkeypatch.delenv("LAMB_TPU_B", raising=False)
    before = dict(os.environ)
    with pytest.raises(ValueError, match="fails"), variables(LAMB_TPU_A="a", LAMB_TPU_B="b"):
        assert (os.environ["LAMB_TPU_A"], os.environ["LAMB_TPU_B"]) == ("a", "b")
        raise ValueError("fails")
    assert dict(os.environ) == before
