"""The norm test."""

import doctest

import pytest

from lamb_tpu.batching.rules import NormTest, norm_test


def test_docstrings() -> None:
    result = doctest.testmod(norm_test)
    assert result.failed == 0 and result.attempted >= 2


def test_it_never_shrinks_and_rounds_up() -> None:
    rule = NormTest(quantum=8, upper=1024, eta=0.5)
    batches = [rule.next_batch(64, {"variance": v, "grad_sq": 2.0}, 0) for v in (1, 32, 33, 1e6)]
    assert batches == [64, 64, 72, 1024]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="eta must be above 0, not 0"):
        NormTest(quantum=8, upper=64, eta=0)
