"""A batch that never changes."""

import doctest

from lamb_tpu.batching.rules import constant


def test_docstrings() -> None:
    result = doctest.testmod(constant)
    assert result.failed == 0 and result.attempted >= 1


def test_it_reads_nothing() -> None:
    rule = constant.Constant(quantum=4)
    assert [rule.next_batch(batch, {}, batch * 9) for batch in (4, 12)] == [4, 12]
