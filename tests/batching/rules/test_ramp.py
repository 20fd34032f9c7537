"""Tests batch sizes that are functions of the number of examples seen."""

import pytest

from lamb_tpu.batching.learning_rate import rate_factor
from lamb_tpu.batching.rules.ramp import Ramp, seesaw, seesaw_points


def test_a_linear_ramp_is_the_line_rounded_down_and_never_leaves_its_ends() -> None:
    rule = Ramp(granularity=16, points=((0, 16), (1000, 160)), linear=True)
    batches = [rule.next_batch(16, {}, examples) for examples in range(1200)]
    assert batches == sorted(batches) and set(batches) == set(range(16, 161, 16))
    for examples in range(0, 1000, 7):
        exact = 16 + 144 * examples / 1000
        assert exact - 16 < batches[examples] <= exact


def test_a_ramp_may_fall() -> None:
    rule = Ramp(granularity=8, points=((0, 64), (100, 16)), linear=True)
    assert [rule.next_batch(8, {}, e) for e in (0, 50, 100)] == [64, 40, 16]


@pytest.mark.parametrize("decay", [1.5, 2.0, 4.0])
def test_seesaw_is_a_decaying_schedule_whose_rate_follows_the_root(decay) -> None:
    """The schedule's factor 1 / decay, times the root of the batch factor, is Seesaw's rate factor."""
    factors = seesaw(decay)
    following = rate_factor("sqrt", 1000, round(1000 * factors.batch))
    assert following / decay == pytest.approx(factors.rate, rel=1e-12)


def test_seesaw_rounds_to_the_granularity() -> None:
    points = seesaw_points(64, [10, 20, 30], decay=1.5, granularity=32)
    assert points == ((0, 64), (10, 96), (20, 128), (30, 224))  # 96, 144, 216
    Ramp(granularity=32, points=points)


@pytest.mark.parametrize(
    "points, message",
    [
        ((), r"points=\(\) must be a list of pairs"),
        ((8,), r"points=\(8,\) must be a list of pairs"),
        (((5, 8),), r"points=\(\(5, 8\),\) must have strictly increasing"),
        (
            ((0, 8), (9, 16), (9, 24)),
            "points=.* must have strictly increasing numbers of examples that begin at 0",
        ),
        (
            ((0, 8), (9, 12)),
            r"points\[1\]\[1\]=12 must be a multiple of the batch granularity 8; use 8 or 16",
        ),
        (((0, 8), (2.5, 16)), r"points\[1\]\[0\]=2.5 must be a whole number"),
    ],
)
def test_errors(points, message) -> None:
    with pytest.raises(ValueError, match=message):
        Ramp(granularity=8, points=points)
    with pytest.raises(ValueError, match="decay=0.5 must be finite and at least 1"):
        seesaw(0.5)
