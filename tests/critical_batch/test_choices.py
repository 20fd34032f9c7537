"""Tests positions, batch sizes and lengths of branches, and errors about wrong options."""

import doctest
from typing import Any

import pytest

from lamb_tpu.critical_batch import choices
from lamb_tpu.critical_batch.choices import Study, StudyRequest, check, choose, key_of, span, starts
from lamb_tpu.run import recipe as recipe_lib
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import Recipe
from tests import tiny
from tests.raising import rejected


def recipe(duration: str = "1000 steps") -> Recipe:
    """Returns a recipe with 64 examples per update and 4 updates per epoch."""
    return recipe_lib.resolve(tiny.digits(duration=duration), 256)


def study(**changes: Any) -> Study:
    """Returns a study with two branches; `changes` replaces fields."""
    fields = {"starts": [4], "factors": [1, 2], "at": [6, 8], "seeds": [0]}
    return Study(**{"scaling": "sqrt", "split": "test", "metric": "loss", **fields, **changes})


def test_docstrings() -> None:
    result = doctest.testmod(choices)
    assert result.failed == 0 and result.attempted >= 1


def test_factors() -> None:
    assert check(StudyRequest("10 percent")) == [1, 2, 4, 8]
    assert check(StudyRequest("10 percent", factors="1, 3")) == [1, 3]


def test_a_branch_has_whole_updates_at_every_factor() -> None:
    assert span("2 percent", [1, 2, 4], recipe()) == 20
    assert span("6.5 epochs", [1, 2, 4], recipe()) == 28
    assert span("25 steps", [1, 2, 3], recipe()) == 30


def test_positions_are_the_nearest_checkpoints() -> None:
    there = [101, 295, 300, 600, 1000]
    assert starts("10, 30, 60 percent", there, 8, recipe()) == [101, 300, 600]
    # The positions may be in any order and any unit.
    assert starts("150 epochs, 105 steps, 29.5 percent", there, 5, recipe()) == [101, 295, 600]
    # In a short run, one update is more than one percent of the run.
    assert starts("3 steps", [4, 8], 8, recipe("12 steps")) == [4]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"factors": "2,4"}, ("--factors", "2,4", "must be two or more")),
        ({"factors": "1"}, ("--factors", "1", "must be two or more")),
        ({"factors": "1,2,2"}, ("--factors", "1,2,2", "must be two or more")),
        ({"factors": "1,4,2"}, ("--factors", "1,4,2", "must be two or more")),
        ({"factors": "1,2.5"}, ("--factors", "1,2.5", "must be two or more")),
        ({"factors": "1,,2"}, ("--factors", "1,,2", "must be two or more")),
        ({"tolerance": 0.0}, ("--tolerance", 0.0, "is out of range")),
        ({"tolerance": float("nan")}, ("--tolerance", ..., "is out of range")),
        ({"seeds": 0}, ("--seeds", 0, "is out of range", "use at least 1")),
        (
            {"at": "10, 30"},
            ("--at", ..., ": ' 30' is not a duration", "write one number and one unit (steps,"),
        ),
        ({"at": "ten percent"}, ("--at", ..., ": 'ten percent' is not a duration")),
        ({"at": "10 percent,"}, ("--at", ..., ": '' is not a duration")),
        ({"at": "110 percent"}, ("--at", ..., ": 110 percent exceeds the full run", "at most 100")),
        ({"span": "2"}, ("--span", ..., ": '2' is not a duration")),
    ],
)
def test_errors_that_need_no_run(change: dict[str, Any], message: tuple[Any, ...]) -> None:
    with rejected(*message):
        check(StudyRequest(**({"at": "10 percent"} | change)))


@pytest.mark.parametrize(
    "at, problem, remedy",
    [
        (
            "20 percent",
            "is update 200, far from the checkpoints at updates 100 (10",
            "use one of these updates, or a run with",
        ),
        (
            "99 percent",
            "starts a branch of 24 updates at 992, but the run has only 1,000",
            "use an earlier position, or a shorter",
        ),
        (
            "30, 32 percent",
            "starts a branch of 24 updates at update 320, which overlaps the branch at update 300",
            "leave out one position",
        ),
        (
            "10, 10.1 percent",
            "starts a branch of 24 updates at update 100, which overlaps the branch at update 100",
            "use a shorter --span",
        ),
    ],
)
def test_positions_without_a_branch(at: str, problem: str, remedy: str) -> None:
    with rejected("--at", at.rpartition(", ")[2], problem, remedy):
        starts(at, [100, 300, 320, 992], 24, recipe())


def test_too_few_updates() -> None:
    problem = "gives a branch at 8 times the batch size too few updates (3)"
    with rejected("--span", "2 percent", problem, "use at least '32 steps', or smaller"):
        span("2 percent", [1, 2, 8], recipe())
    assert span("32 steps", [1, 2, 8], recipe()) == 32
    with rejected("--span", "1 steps", "at 3 times the batch size too few updates (2)"):
        span("1 steps", [1, 2, 3], recipe())
    assert span("12 steps", [1, 2, 3], recipe()) == 12


def test_study() -> None:
    run = prepare(tiny.digits(schedule__scaling="legw", seed=3), None)
    request = StudyRequest("4 steps", span="8 steps", seeds=2, split="train[:64]")
    chosen = choose(run, request, [1, 2], [4, 8, 12])
    assert chosen == study(seeds=[3, 4], split="train[:64]")
    assert [(b["seed"], b["factor"]) for b in chosen.branches()] == [(3, 1), (3, 2), (4, 1), (4, 2)]
    assert choose(run, request._replace(scaling="linear"), [1, 2], [4]).scaling == "linear"
    with rejected("--metric", "accuracy", "is unknown", "use loss"):
        choose(run, request._replace(metric="accuracy"), [1, 2], [4])


def test_loss_of_the_evaluation() -> None:
    assert choices._loss(["nsp_accuracy", "ema_loss", "mlm_loss", "nsp_loss"], None) == "mlm_loss"
    assert choices._loss(["mlm_loss", "nsp_loss"], "nsp_loss") == "nsp_loss"
    with rejected("--metric", None, "is unknown", "use a run whose evaluation measures"):
        choices._loss(["f1", "exact_match"], None)


def test_a_record_has_the_key_of_its_branch() -> None:
    first, second = study().branches()
    assert key_of(first) == key_of({"losses": [1.0], "rate_factor": 1.0, **first})
    assert key_of(first) != key_of(second)
