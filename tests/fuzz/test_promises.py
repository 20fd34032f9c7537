"""The promise of an exchange with error feedback holds, and a lost residual breaks it."""

import jax
import numpy as np
import pytest

from lamb_tpu.parallel.exchange.residual import ResidualComponent
from tests.fuzz import checking, promises, trying
from tests.fuzz.case import Case

EXCHANGE = {"name": "topk", "ratio": 0.1}
SGD = {"name": "sgd", "learning_rate": 0.1, "rules": "all"}
CONFIG = {"optimizer": SGD, "checkpoint.every": "1 steps", "parallel.exchange": EXCHANGE}
FIRST = {"mesh.data": 4, "parallel.backend": "shard_map"}
CASE = Case("mlp", CONFIG, FIRST, {**FIRST, "mesh.data": 2})


@pytest.mark.long
def test_a_lost_residual_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert promises.is_lossy(CASE) and not promises.is_lossy(Case("mlp"))
    original = ResidualComponent.resumed

    def resumed(self: ResidualComponent, value: dict) -> dict:
        return jax.tree.map(lambda leaf: leaf * 0, original(self, value)) | {
            "devices": original(self, value)["devices"]
        }

    monkeypatch.setattr(ResidualComponent, "resumed", resumed)
    outcome = trying.attempt(CASE, checking.Compiles())
    whats = [each.what for each in outcome.differences]
    for leg, update in (("first", 1), ("first", 4), ("second", 3), ("second", 4)):
        assert f"{leg} update {update}: sum that arrived plus the residuals" in whats
    # All other updates keep the promise.
    [problem] = outcome.problems
    assert problem.startswith("second update 3: sum that arrived")


def test_residuals_are_summed_over_devices() -> None:
    arrays = {
        ".residual['devices']": np.array([2, 1]),
        ".residual['kept'].device['error'][0]": np.arange(8.0),
        ".residual['kept'].split[0]": np.array([10.0, 20, 30, 0]),
    }
    assert promises._residual(arrays, [3]).tolist() == [14.0, 26.0, 38.0]
    assert promises._residual(None, [3]).tolist() == [0.0, 0.0, 0.0]
