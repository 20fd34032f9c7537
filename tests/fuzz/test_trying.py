"""A whole case: a correct package passes, and a planted fault fails."""

from typing import Any

import jax
import pytest

from lamb_tpu.parallel.exchange.sharded import ShardedExchange
from tests.fuzz import checking, trying
from tests.fuzz.case import Case
from tests.fuzz.comparing import LIMIT

OPTIMIZER = {"name": "momentum", "learning_rate": 0.05, "rules": "all", "weight_decay": 0.1}
SECOND = {"mesh.data": 2, "parallel.backend": "shard_map"}
CASE = Case("mlp", {"optimizer": OPTIMIZER, "ema.decay": 0.5}, {"mesh.fsdp": 2}, SECOND)


@pytest.fixture(scope="module")
def compiles() -> checking.Compiles:
    return checking.Compiles()


@pytest.mark.long
def test_a_correct_case_passes(compiles: checking.Compiles) -> None:
    outcome = trying.attempt(CASE, compiles)
    assert not outcome.rejected and not outcome.problems
    ratios = [each.ratio for each in outcome.differences]
    assert len(ratios) > 100 and 0.1 < max(ratios) < LIMIT / 4
    names = " ".join(each.what for each in outcome.differences)
    for part in ("second update 4 .params", "first eval 4 ema_loss", "by its formula"):
        assert part in names, part


@pytest.mark.long
def test_a_gradient_times_the_devices_fails(
    monkeypatch: pytest.MonkeyPatch, compiles: checking.Compiles
) -> None:
    original = ShardedExchange.reduce

    def reduce(self: ShardedExchange, grads: Any, residual: Any) -> Any:
        sums, residual = original(self, grads, residual)
        return jax.tree.map(lambda leaf: 2 * leaf, sums), residual

    monkeypatch.setattr(ShardedExchange, "reduce", reduce)
    outcome = trying.attempt(CASE, compiles)
    assert outcome.problems and all(each.startswith("second") for each in outcome.problems)


def test_a_rejection_is_no_failure(compiles: checking.Compiles) -> None:
    rejected = Case("mlp", {}, {"mesh.model": 2, "parallel.backend": "shard_map"})
    outcome = trying.attempt(rejected, compiles)
    assert (
        "supports only mesh axes that split the batch" in outcome.rejected and not outcome.problems
    )


def test_a_crash_is_a_problem(monkeypatch: pytest.MonkeyPatch, compiles: checking.Compiles) -> None:
    monkeypatch.setattr(trying.oracle, "Oracle", lambda case: 1 / 0)
    [problem] = trying.attempt(Case("mlp"), compiles).problems
    assert problem.startswith("ZeroDivisionError at test_trying.py:")
