"""Shrinking removes the features that a failure does not need."""

from tests.fuzz.case import Case
from tests.fuzz.drawing import draw
from tests.fuzz.shrinking import shrink


def test_only_the_needed_features_stay() -> None:
    case = next(each for each in map(draw, range(100)) if "ema.decay" in each.config)
    second = {**case.second, "mesh.fsdp": 2}
    case = Case(case.family, case.config, case.first, second)

    def fails(candidate: Case) -> bool:
        return "ema.decay" in candidate.config and candidate.second.get("mesh.fsdp", 1) > 1

    smallest = shrink(case, fails, 60)
    assert smallest == Case("mlp", {"ema.decay": 0.5}, {}, {"mesh.fsdp": 2})


def test_the_time_is_limited() -> None:
    case = draw(0)
    assert shrink(case, lambda candidate: True, 0.0) == case
