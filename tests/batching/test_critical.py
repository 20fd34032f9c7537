"""Tests the critical batch computed from losses at several batch sizes."""

import math

import pytest

from lamb_tpu.batching.critical import Critical, critical, excess

BATCHES = (32, 64, 128, 256)


def test_excess_is_paired_seed_by_seed() -> None:
    # The references of the seeds differ by more than any excess; pairing by seed cancels this.
    actual = excess([1.02, 2.02, 4.10], [1.0, 2.0, 4.0])
    ratio = 7.14 / 7
    rests = [1.02 - ratio, 2.02 - 2 * ratio, 4.10 - 4 * ratio]
    assert sum(rests) == pytest.approx(0, abs=1e-12)
    deviation = math.sqrt(sum(rest**2 for rest in rests) / 2)
    assert actual.mean == pytest.approx(ratio - 1)
    assert actual.error == pytest.approx(deviation / math.sqrt(3) / (7 / 3))
    assert actual.error < 0.005
    # One seed has no error, and a reference near 0 does not dominate the mean.
    assert math.isnan(excess([1.1], [1.0]).error)
    assert excess([0.1, 1.0], [0.001, 1.0]).mean == pytest.approx(0.099 / 1.001)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_one_branch_that_diverged_makes_the_excess_infinite(loss: float) -> None:
    assert excess([1.0, loss], [1.0, 1.0])[0] == math.inf


@pytest.mark.parametrize("reference", [0.0, -1.0, math.nan, math.inf])
def test_loss_to_compare_with(reference: float) -> None:
    with pytest.raises(ValueError, match="the losses of the smallest batch must be finite"):
        excess([1.0, 1.0], [1.0, reference])


@pytest.mark.parametrize(
    "excesses, expected",
    [
        # The crossing is halfway between the logarithms of the batch sizes.
        ((0.0, 0.005, 0.015, 0.5), Critical(64, 64 * 2**0.5, True)),
        ((0.0, 0.02, 0.03, 0.04), Critical(32, 32 * 2**0.5, True)),
        # An excess that equals the tolerance is within the tolerance.
        ((0.0, 0.01, 0.01, 0.01), Critical(256, 256.0, False)),
        ((0.0, -0.3, -0.2, -0.1), Critical(256, 256.0, False)),
        # A batch within the tolerance does not count if a smaller batch exceeds the tolerance.
        ((0.0, 0.02, 0.0, 0.0), Critical(32, 32 * 2**0.5, True)),
        ((0.0, 0.004, math.inf, math.inf), Critical(64, 64.0, True)),
        ((0.0, math.nan, 0.0, 0.0), Critical(32, 32.0, True)),
    ],
)
def test_critical(excesses: tuple[float, ...], expected: Critical) -> None:
    actual = critical(BATCHES, excesses, tolerance=0.01)
    assert actual == expected._replace(crossing=pytest.approx(expected.crossing))


@pytest.mark.parametrize(
    "batches, excesses, tolerance, message",
    [
        ((64, 64), (0.0, 0.0), 0.1, r"batches=\[64, 64\] must be a non-empty, strictly"),
        ((), (), 0.1, r"batches=\[\] must be a non-empty, strictly increasing"),
        ((1.5, 2), (0.0, 0.0), 0.1, "batch=1.5 must be a whole number of at least 1"),
        ((1, 2), (0.2, 0.0), 0.1, r"excesses\[0\]=0.2 must be at most the tolerance, 0.1"),
        ((1, 2), (0.0, 0.0), -0.1, "tolerance=-0.1 must be at least 0"),
        ((1, 2), (0.0,), 0.1, "shorter"),
    ],
)
def test_errors(batches: tuple, excesses: tuple, tolerance: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        critical(batches, excesses, tolerance)
