"""Places, batches and lengths of branches, and one sentence for each mistake in them."""

import doctest
from typing import Any

import pytest

from lamb_tpu.critical_batch import choices
from lamb_tpu.critical_batch.choices import Request, Study, check, choose, key_of, span, starts
from lamb_tpu.errors import UserError
from lamb_tpu.run import recipe as recipe_lib
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import Recipe
from tests import tiny


def recipe(duration: str = "1000 steps") -> Recipe:
    """Recipe of 64 examples an update and 4 updates an epoch."""
    return recipe_lib.resolve(tiny.digits(duration=duration), 256)


def test_docstrings() -> None:
    result = doctest.testmod(choices)
    assert result.failed == 0 and result.attempted >= 1


def test_factors() -> None:
    assert check(Request("10 percent")) == [1, 2, 4, 8]
    assert check(Request("10 percent", factors="1, 3")) == [1, 3]


def test_a_branch_has_whole_updates_at_every_factor() -> None:
    assert span("2 percent", [1, 2, 4], recipe()) == 20
    assert span("6.5 epochs", [1, 2, 4], recipe()) == 28
    assert span("25 steps", [1, 2, 3], recipe()) == 30


def test_places_are_the_nearest_checkpoints() -> None:
    there = [101, 295, 300, 600, 1000]
    assert starts("10, 30, 60 percent", there, 8, recipe()) == [101, 300, 600]
    # In any order and unit.
    assert starts("150 epochs, 105 steps, 29.5 percent", there, 5, recipe()) == [101, 295, 600]
    # In a short run an update is nearer than one percent.
    assert starts("3 steps", [4, 8], 8, recipe("12 steps")) == [4]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"factors": "2,4"},
            "--factors is '2,4'; it must be whole numbers that ascend from 1, such a",
        ),
        ({"factors": "1"}, "--factors is '1'; it must be whole"),
        ({"factors": "1,2,2"}, "--factors is '1,2,2'; it must be whole"),
        ({"factors": "1,4,2"}, "--factors is '1,4,2'; it must be whole"),
        ({"factors": "1,2.5"}, "--factors is '1,2.5'; it must be whole"),
        ({"factors": "1,,2"}, "--factors is '1,,2'; it must be whole"),
        ({"tolerance": 0.0}, "--tolerance is 0.0; it must be above 0, such as 0.01"),
        ({"tolerance": float("nan")}, "--tolerance is nan; it must be above 0"),
        ({"seeds": 0}, "--seeds is 0; it must be at least 1"),
        (
            {"at": "10, 30"},
            "--at: '.*30' is not a duration; write one number and one of steps, epochs",
        ),
        ({"at": "ten percent"}, "--at: 'ten percent' is not a duration"),
        ({"at": "10 percent,"}, "--at: '' is not a duration"),
        ({"at": "110 percent"}, "--at: 110 percent is more than the whole run"),
        ({"span": "2"}, "--span: '2' is not a duration"),
    ],
)
def test_mistakes_that_need_no_run(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(Request(**({"at": "10 percent"} | change)))


@pytest.mark.parametrize(
    "at, message",
    [
        (
            "20 percent",
            "--at has '20 percent', which is update 200, and the run has no checkpoint "
            "within 1% of its length from there; it has those of updates 100 .10 percent., 300 .30 "
            "percent., 320 .32 percent., 992 .99.2 percent., and a run with "
            "--config.checkpoint.keep_every='10 percent' keeps some all along",
        ),
        (
            "99 percent",
            "and a branch of 24 updates from the checkpoint of update 992 would go on "
            "beyond the run's last, 1,000; give an earlier place, or a shorter --span",
        ),
        (
            "30, 32 percent",
            "--at has '32 percent', whose checkpoint of update 320 is less than a "
            "branch, 24 updates, from that of update 300; leave one out",
        ),
        ("10, 10.1 percent", "whose checkpoint of update 100 is less than a branch"),
    ],
)
def test_places_without_a_branch(at: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        starts(at, [100, 300, 320, 992], 24, recipe())


def test_too_few_updates() -> None:
    message = (
        "--span is '2 percent', in which a branch at 8 times the batch has 3 updates and needs at "
        "least 4; give at least '32 steps', or smaller --factors"
    )
    with pytest.raises(UserError, match=message):
        span("2 percent", [1, 2, 8], recipe())
    assert span("32 steps", [1, 2, 8], recipe()) == 32
    with pytest.raises(UserError, match="give at least '12 steps'"):
        span("1 steps", [1, 2, 3], recipe())
    assert span("12 steps", [1, 2, 3], recipe()) == 12


def test_study() -> None:
    settings = tiny.digits(schedule__scaling="legw", seed=3)
    run = prepare(settings, None)
    request = Request("4 steps", span="8 steps", seeds=2, split="train[:64]")
    study = choose(run, request, [1, 2], [4, 8, 12])
    assert study == Study([4], [1, 2], [6, 8], "sqrt", [3, 4], "train[:64]", "loss")
    assert [(b["seed"], b["factor"]) for b in study.branches()] == [(3, 1), (3, 2), (4, 1), (4, 2)]
    assert choose(run, request._replace(scaling="linear"), [1, 2], [4]).scaling == "linear"
    with pytest.raises(UserError, match="--metric is 'accuracy'; the losses of this run's evaluat"):
        choose(run, request._replace(metric="accuracy"), [1, 2], [4])


def test_loss_of_the_evaluation() -> None:
    assert choices._loss(["nsp_accuracy", "ema_loss", "mlm_loss", "nsp_loss"], None) == "mlm_loss"
    assert choices._loss(["mlm_loss", "nsp_loss"], "nsp_loss") == "nsp_loss"
    with pytest.raises(UserError, match="--metric is None; the losses .* are: none"):
        choices._loss(["f1", "exact_match"], None)


def test_a_record_has_the_key_of_its_branch() -> None:
    first, second = Study([4], [1, 2], [6, 8], "sqrt", [0], "test", "loss").branches()
    assert key_of(first) == key_of({"losses": [1.0], "rate_factor": 1.0, **first})
    assert key_of(first) != key_of(second)
