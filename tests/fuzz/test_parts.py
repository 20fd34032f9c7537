"""Statistics of parts of a batch, in a run with two devices and two microbatches."""

import pytest

from tests.fuzz import checking, trying
from tests.fuzz.case import Case

ASKED = {"statistics.noise_scale": True, "statistics.halves": True}
FIRST = {"mesh.data": 2, "parallel.backend": "shard_map", **ASKED}


@pytest.mark.long
def test_statistics_of_the_first_update() -> None:
    case = Case("mlp", {"accumulation_steps": 2, "model.dropout_rate": 0.25}, FIRST, FIRST)
    outcome = trying.attempt(case, checking.Compiles())
    assert not outcome.problems
    found = {each.what: each for each in outcome.differences if "update 1" in each.what}
    for name in ("noise_scale/grad_sq", "noise_scale/trace", "similarity"):
        difference = found[f"first update 1 {name}"]
        assert difference.ratio < 1 and difference.value != 0, name
