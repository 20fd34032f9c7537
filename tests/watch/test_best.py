"""The best evaluation so far."""

import json
import math

import pytest

from lamb_tpu.watch.best import Best
from tests.raising import rejected

VALUES = [(10, 0.5), (20, math.nan), (30, 0.9), (40, 0.9), (50, 0.2), (60, 0.2)]


@pytest.mark.parametrize("mode, step, value", [("max", 30, 0.9), ("min", 50, 0.2)])
def test_the_first_of_equal_evaluations(mode: str, step: int, value: float) -> None:
    best = Best("accuracy", mode)
    assert best.step is None
    best.evaluated(5, {"accuracy": math.nan})
    best.evaluated(6, {"loss": 3.0})
    assert best.step is None
    for at, accuracy in VALUES:
        best.evaluated(at, {"accuracy": accuracy, "loss": -accuracy})
    assert (best.step, best.value) == (step, value)


@pytest.mark.parametrize("stop", range(len(VALUES) + 1))
def test_resumed(stop: int) -> None:
    whole, first, second = (Best("accuracy") for _ in range(3))
    for at, accuracy in VALUES:
        whole.evaluated(at, {"accuracy": accuracy})
    for at, accuracy in VALUES[:stop]:
        first.evaluated(at, {"accuracy": accuracy})
    second.restore(json.loads(json.dumps(first.state())))
    for at, accuracy in VALUES[stop:]:
        second.evaluated(at, {"accuracy": accuracy})
    assert second.state() == whole.state()


@pytest.mark.parametrize("other", [Best("loss"), Best("accuracy", "min"), Best("")])
def test_a_state_of_another_metric_is_ignored(other: Best) -> None:
    best = Best("accuracy")
    best.evaluated(10, {"accuracy": 0.5})
    other.restore(best.state())
    assert other.step is None


def test_no_metric() -> None:
    best = Best("")
    best.evaluated(10, {"accuracy": 0.5})
    best.check([])
    assert best.step is None


def test_error() -> None:
    with rejected("config.checkpoint.best", "acc", "is unknown", "use a or b"):
        Best("acc").check(["b", "a"])
