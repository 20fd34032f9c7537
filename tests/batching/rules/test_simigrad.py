"""Tests SimiGrad's rule: changes by a tenth, bounds, smoothing and rounding to the granularity."""

import math

import pytest

from lamb_tpu.batching.rules import SimiGrad
from lamb_tpu.batching.rules.simigrad import round_to_granularity, wanted_batch
from tests.optim import goldens

ENTRIES = [entry for entry in goldens.entries() if entry["family"] == "simigrad"]


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
def test_the_rule_makes_the_recorded_batches(entry) -> None:
    """Compares batch sizes with recorded runs; lower bounds must be multiples of the granularity."""
    hyper, recorded = entry["hyper"], goldens.record(entry)
    granularity = hyper["world"] * hyper["micro0"]
    lower = hyper["lower"]
    arguments = {
        "granularity": granularity,
        "lower": lower,
        "upper": hyper["upper"],
        "target": hyper["target"],
        "smoothing": hyper["smooth"],
    }
    if lower is not None and lower % granularity:
        with pytest.raises(
            ValueError, match="lower=.* must be a multiple of the batch granularity"
        ):
            SimiGrad(**arguments)
        return
    rule = SimiGrad(**arguments)
    for batch, cosine, after in zip(
        *(recorded[name] for name in ("batch_before", "cos", "batch_after")), strict=True
    ):
        assert rule.next_batch(int(batch), {"similarity": float(cosine)}, 0) == after


@pytest.mark.parametrize(
    "batch, similarity, expected",
    [
        (1, 0.5, 2),
        (9, 0.5, 10),
        (10, 0.5, 11),
        (100, 0.5, 110),
        (1, 0.95, 1),
        (2, 0.95, 1),
        (9, 0.95, 8),
        (100, 0.95, 90),
        (100, 0.9, 100),
        (100, math.nan, 100),
    ],
)
def test_a_tenth_and_at_least_one(batch, similarity, expected) -> None:
    assert wanted_batch(batch, similarity, 0.9, 1, 1, 10**6) == expected


def test_bounds_come_after_smoothing() -> None:
    assert wanted_batch(100, 0.5, 0.9, 10, 1, 10**6, smoothing=0.5) == 60  # (10 + 110) / 2
    assert wanted_batch(100, 0.5, 0.9, 10, 80, 10**6, smoothing=0.5) == 80
    assert wanted_batch(100, 0.5, 0.9, 10, 1, 105) == 105


@pytest.mark.parametrize(
    "wanted, batch, expected",
    [
        (17, 16, 24),
        (24, 16, 24),
        (39, 16, 32),
        (16, 16, 16),
        (15, 16, 8),
        (1, 16, 8),
        (7, 8, 8),
        (9, 8, 16),
    ],
)
def test_round_to_granularity(wanted, batch, expected) -> None:
    assert round_to_granularity(wanted, batch, 8) == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"target": 1.5}, "target=1.5 must be a cosine in \\[-1, 1\\]"),
        ({"target": None}, "target=None must be a cosine"),
        (
            {"target": 0.9, "smoothing": 1.0},
            "smoothing=1.0 must be at least 0 and below 1, or None",
        ),
    ],
)
def test_errors(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        SimiGrad(granularity=8, upper=64, **arguments)
