"""Tests durations: valid and invalid texts, and exact numbers of updates."""

from fractions import Fraction

import pytest

from lamb_tpu.optim.durations import Duration, parse


@pytest.mark.parametrize(
    "text, value, unit",
    [
        ("30 epochs", 30, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("1000 steps", 1000, "steps"),
        ("1e3 steps", 1000, "steps"),
        ("50_000 examples", 50_000, "examples"),
        ("5 percent", 5, "percent"),
        (" 0.3125  epochs ", Fraction(5, 16), "epochs"),
        ("0 steps", 0, "steps"),
    ],
)
def test_parse(text, value, unit):
    assert parse(text) == Duration(value, unit)
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "30 epochs 100 steps",
        "30 epochs, 100 steps",
        {"epochs": 30, "steps": 100},
        {"epochs": 30},
        "30",
        "epochs",
        "30epochs",
        "",
        "-3 epochs",
        "nan epochs",
        "inf steps",
        "1/2 epochs",
        "3 Epochs",
        30,
        0.5,
        None,
        ("30 epochs",),
        "0x10 steps",
        "_3 steps",
        "5 %",
        "1e1000 epochs",
        "1e999999999 epochs",
        "9" * 101 + " steps",  # one digit more than a number may have
    ],
)
def test_invalid_texts_are_quoted(text):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert repr(text) in str(error.value)
    assert "one number and one unit (steps, epochs, examples, percent)" in str(error.value)


def test_an_unknown_unit_is_quoted():
    with pytest.raises(ValueError, match="'3 hours' has the unknown unit 'hours'; write one"):
        parse("3 hours")


@pytest.mark.parametrize(
    "value, unit, message",
    [
        (1, "hours", "unit='hours' is unknown; use one of steps"),
        (-1, "steps", "value=-1 steps must be a number of at least 0"),
        (101, "percent", "101 percent exceeds the full run"),
        (10**18 + 1, "epochs", r"a duration must be at most 1e\+18 epochs"),
        (1e300, "steps", r"a duration must be at most 1e\+18 steps"),
    ],
)
def test_durations_that_cannot_be(value, unit, message):
    with pytest.raises(ValueError, match=message):
        Duration(value, unit)


@pytest.mark.parametrize(
    "text, arguments, steps, full",
    [
        ("30 epochs", {"batch_size": 1024, "num_examples": 60_000}, 1757.8125, 1758),
        ("20 epochs", {"batch_size": 32_768, "num_examples": 1_281_167}, 781.9622802734375, 782),
        ("90 epochs", {"batch_size": 32_768, "num_examples": 1_281_167}, 3518.8302612304688, 3519),
        ("50_000 examples", {"batch_size": 500}, 100.0, 100),
        ("50_001 examples", {"batch_size": 500}, 100.002, 101),
        ("7 steps", {"batch_size": 500}, 7.0, 7),
        ("12.5 percent", {"batch_size": 500, "total_steps": 80}, 10.0, 10),
        ("5 percent", {"batch_size": 500, "total_steps": 1757.8125}, 87.890625, 88),
        # In floating point 0.7 * 1000 / 100 and 1.1 * 3000 / 100 are slightly above 7 and 33.
        ("0.7 epochs", {"batch_size": 100, "num_examples": 1000}, 7.0, 7),
        ("1.1 epochs", {"batch_size": 100, "num_examples": 3000}, 33.0, 33),
    ],
)
def test_steps(text, arguments, steps, full):
    duration = parse(text)
    assert duration.steps(**arguments) == steps
    assert duration.whole_steps(**arguments) == full
    assert isinstance(duration.steps(**arguments), float)


@pytest.mark.parametrize(
    "text, arguments, message",
    [
        (
            "3 epochs",
            {"batch_size": 5},
            "'3 epochs' needs a finite number above 0 for num_examples, not None",
        ),
        (
            "3 epochs",
            {"batch_size": 0, "num_examples": 5},
            "'3 epochs' needs a finite number above 0 for batch_size, not 0",
        ),
        (
            "3 percent",
            {"batch_size": 5},
            "'3 percent' needs a finite number above 0 for total_steps, not None",
        ),
        (
            "3 examples",
            {"batch_size": -5},
            "'3 examples' needs a finite number above 0 for batch_size, not -5",
        ),
    ],
)
def test_a_number_that_the_unit_needs(text, arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(text).steps(**arguments)


def test_parsing_a_duration_returns_it():
    assert parse(Duration(0.1, "epochs")) == parse("0.1 epochs")
