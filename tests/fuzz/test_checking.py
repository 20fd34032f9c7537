"""Checks of rejections."""

from lamb_tpu.errors import UserError
from tests.fuzz import checking
from tests.fuzz.case import Case

REJECTED = Case("mlp", {"ema.decay": 0.5}, {}, {"mesh.model": 2, "parallel.backend": "shard_map"})


def test_a_rejection_of_the_second_leg() -> None:
    found = checking.rejection(REJECTED)
    assert found is not None and found.error.key == "config.parallel.backend"
    assert checking.problems(REJECTED, found) == []
    assert checking.rejection(Case("mlp")) is None


def test_problems() -> None:
    found = checking.rejection(REJECTED)
    assert found is not None
    late = checking.problems(REJECTED, found._replace(compiled=40))
    assert len(late) == 1 and "40 programs were compiled before" in late[0]
    two = UserError("config.x", 1, "is wrong. It is", "Change it")
    wrong = " ".join(checking.problems(REJECTED, checking.Rejection(two, 0)))
    assert "not one sentence" in wrong and "reverse order" in wrong


def test_reverse_order() -> None:
    case = Case("mlp", {"seed": 1, "ema.decay": 0.5}, {"mesh.data": 2, "mesh.fsdp": 2})
    assert list(checking.backwards(case).config) == ["ema.decay", "seed"]
    assert checking.backwards(case) == case
