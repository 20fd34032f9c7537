"""Points of a search cover the ranges, depend only on the seed, and extend smaller searches."""

import doctest
import math

import pytest

from lamb_tpu.reproduce import search
from lamb_tpu.reproduce.search import Choice, Dimension, Range, grid, halton_points, parse
from tests.raising import rejected

RATE = Range("optimizer.learning_rate", 1e-4, 1e-1, log=True)
MIXED: list[Dimension] = [
    RATE,
    Range("ema.decay", 0.0, 0.5),
    Choice("optimizer.name", ("lamb", "adamw", "lars")),
    Range("batch_size", 16, 64, log=True, integers=True),
]


def test_forms() -> None:
    assert doctest.testmod(search).failed == 0
    assert parse("optimizer.learning_rate=log(1e-4, 1e-1)") == RATE
    assert parse("--config.ema.decay = linear(0,.5)") == MIXED[1]
    assert parse("optimizer.name=lamb, adamw,lars") == MIXED[2]
    assert parse("x=(64,32),[128, 64],(8,)").values == ("(64,32)", "[128, 64]", "(8,)")
    assert parse("seed=1") == Choice("seed", ("1",))


@pytest.mark.parametrize(
    "text, problem",
    [
        ("optimizer.learning_rate", "is not KEY=FORM"),
        ("=log(1,2)", "is not KEY=FORM"),
        ("a=", "is not KEY=FORM"),
        ("a=log(0,1)", "has a logarithmic range with a bound"),
        ("a=log(-1,1)", "has a logarithmic range with a bound"),
        ("a=log(1,1)", "has an empty range"),
        ("a=linear(2,1)", "has an empty range"),
        ("a=linear(2)", "does not have two finite bounds"),
        ("a=linear(1,2,3)", "does not have two finite bounds"),
        ("a=log(nan,1)", "does not have two finite bounds"),
        ("a=linear(0,inf)", "does not have two finite bounds"),
        ("a=uniform(0,1)", "has the unknown form 'uniform'"),
        ("a=1,,2", "has empty or repeated values"),
        ("a=1,2,1", "has empty or repeated values"),
    ],
)
def test_errors(text: str, problem: str) -> None:
    with rejected("--search", text, problem, "use "):
        parse(text)


def test_points_lie_within_and_spread() -> None:
    points = halton_points(MIXED, 64, seed=3)
    rates = [math.log10(point[RATE.key]) for point in points]
    assert all(-4 <= rate <= -1 for rate in rates)
    # Each eighth of the range has about 8 of the 64 points: the first dimension's sequence has base 2.
    eighths = [int((rate + 4) / 3 * 8) for rate in rates]
    assert all(7 <= eighths.count(number) <= 9 for number in range(8))
    names = [point["optimizer.name"] for point in points]
    assert all(18 <= names.count(name) <= 25 for name in ("lamb", "adamw", "lars"))
    sizes = {point["batch_size"] for point in points}
    assert all(type(size) is int and 16 <= size <= 64 for size in sizes) and len(sizes) > 20


def test_more_points_keep_the_first() -> None:
    many = halton_points(MIXED, 40, seed=1)
    assert all(halton_points(MIXED, count, seed=1) == many[:count] for count in (1, 7, 16))
    assert halton_points(MIXED, 7, seed=2) != many[:7]


def test_points_differ() -> None:
    few: list[Dimension] = [Choice("a", ("x", "y")), Range("b", 1, 3, integers=True)]
    points = halton_points(few, 6, seed=0)
    assert len({tuple(point.values()) for point in points}) == 6
    assert points[:4] == halton_points(few, 4, seed=0)
    with rejected("--trials", 7, "is more than the 6 different points of a and b", "use fewer"):
        halton_points(few, 7, seed=0)


def test_a_rounded_number_stays_between_the_bounds() -> None:
    narrow = Range("a", 0.12345678, 0.1234568, log=True)
    assert {narrow.at(0.0), narrow.at(0.999)} <= {narrow.low, narrow.high}


def test_grid() -> None:
    expected = [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert grid([Choice("a", (1, 2)), Choice("b", ("x", "y"))]) == expected
