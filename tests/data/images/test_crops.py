"""Boxes: the distribution of random boxes, and the position of the central box."""

import math

import numpy as np
import pytest

from lamb_tpu.data.images.crops import Box, central_box, inception_box, tpu_fraction

DRAWS = 20_000


def heights_by_definition(
    height: int, width: int, min_area: float, min_covered: float
) -> np.ndarray:
    """Returns the probability of each box height, float64 (height + 1,), over a grid of ratios."""
    shares = np.zeros(height + 2)
    least = min_area * height * width
    for ratio in np.linspace(3 / 4, 4 / 3, 2001):
        low = round(math.sqrt(least / ratio))
        allowed = [h for h in range(low, height + 1) if round(h * ratio) <= width]
        for h in allowed:  # if rounding leaves too small an area, one row is added
            high = h + (h * round(h * ratio) < least)
            if high * round(high * ratio) >= min_covered * height * width:
                shares[high] += 1 / len(allowed)
    return shares[:-1] / shares.sum()


@pytest.mark.parametrize(
    "height, width, min_area, min_covered",
    [(75, 100, 0.08, 0.1), (75, 100, 0.08, 0.0), (90, 60, 0.3, 0.1), (75, 100, 0.2, 0.25)],
)
def test_heights_are_uniform_among_those_that_fit(
    height: int, width: int, min_area: float, min_covered: float
) -> None:
    rng = np.random.default_rng(0)
    boxes = [inception_box(height, width, rng, min_area, min_covered) for _ in range(DRAWS)]
    actual = np.bincount([box.height for box in boxes], minlength=height + 1) / DRAWS
    expected = heights_by_definition(height, width, min_area, min_covered)
    # Allows four standard deviations of a count, plus the grid's error.
    assert (np.abs(actual - expected) < 4 * np.sqrt(expected / DRAWS) + 2e-3).all()
    ratios = np.array([box.width / box.height for box in boxes])
    if min_covered > 0.2:
        return  # redrawn boxes make the ratios non-uniform
    assert abs(ratios.mean() - (3 / 4 + 4 / 3) / 2) < 0.01
    # A uniform ratio has a standard deviation of its range / sqrt(12).
    assert abs(ratios.std() - (4 / 3 - 3 / 4) / math.sqrt(12)) < 0.01


def test_areas_are_as_often_as_tensorflows() -> None:
    """Compares the histogram of areas, in tenths of an image of 75 x 100, with TensorFlow's op.

    The numbers are from 100,000 boxes that tf.image.stateless_sample_distorted_bounding_box of
    TensorFlow 2.21 drew with the TPU code's arguments: area_range=(0.08, 1), aspect_ratio_range=(3/4,
    4/3), min_object_covered=0.1, max_attempts=10, and the full image as the object.
    """
    theirs = np.array([0, 23403, 17731, 14987, 13372, 12062, 8546, 5610, 3113, 1176]) / 1e5
    rng = np.random.default_rng(5)
    boxes = [inception_box(75, 100, rng) for _ in range(DRAWS)]
    areas = np.array([box.height * box.width / 7500 for box in boxes])
    actual = np.histogram(areas, np.linspace(0, 1, 11))[0] / DRAWS
    assert (np.abs(actual - theirs) <= 4 * np.sqrt(theirs * (1 / DRAWS + 1e-5))).all()


def test_boxes_keep_within_their_bounds() -> None:
    rng = np.random.default_rng(1)
    for _ in range(3000):
        height, width = (int(side) for side in rng.integers(40, 200, 2))
        box = inception_box(height, width, rng, 0.2)
        if box is None:
            assert max(height / width, width / height) > 3
            continue
        assert 0 <= box.top <= height - box.height and 0 <= box.left <= width - box.width
        assert 0.2 * height * width <= box.height * box.width
        # Rounding changes a side by up to half a pixel.
        assert (box.width + 0.5) / box.height >= 3 / 4
        assert (box.width - 0.5) / box.height <= 4 / 3


def test_positions_are_uniform() -> None:
    rng = np.random.default_rng(2)
    tops = [[] for _ in range(25)]
    lefts = [[] for _ in range(31)]
    for _ in range(DRAWS):
        box = inception_box(24, 30, rng, 0.3)
        tops[box.height].append(box.top)
        lefts[box.width].append(box.left)
    for side, counts in ((24, tops), (30, lefts)):
        for length, actual in enumerate(counts):
            if len(actual) > 500:
                counts = np.bincount(actual, minlength=side - length + 1)
                expected = len(actual) / (side - length + 1)
                assert len(counts) == side - length + 1
                assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected)).all()


def test_full_image_and_smallest_box() -> None:
    rng = np.random.default_rng(3)
    assert inception_box(1, 1, rng) == Box(0, 0, 1, 1)
    full = [inception_box(30, 30, rng, 1.0) for _ in range(300)]
    assert Box(0, 0, 30, 30) in full and set(full) <= {Box(0, 0, 30, 30), None}


def test_where_no_box_fits_there_is_none() -> None:
    rng = np.random.default_rng(4)
    assert inception_box(20, 400, rng) is None and inception_box(400, 20, rng) is None
    # The largest box, 20 by 26.7 pixels, covers 0.083 of the image, less than the minimum of 0.1.
    assert {inception_box(20, 320, rng) for _ in range(50)} == {None}
    # With a lower minimum most attempts fail, but some calls succeed in one of ten attempts.
    actual = [inception_box(20, 320, rng, min_covered=0.0) for _ in range(300)]
    assert 30 < sum(box is not None for box in actual) < 290


@pytest.mark.parametrize(
    "height, width, fraction, expected",
    [
        # As in the TPU code: int(0.875 * 375), (47 + 1) // 2.
        (375, 500, 0.875, Box(24, 86, 328, 328)),
        (500, 375, 0.875, Box(86, 24, 328, 328)),
        (64, 64, 1.0, Box(0, 0, 64, 64)),
        (256, 341, 0.875, Box(16, 59, 224, 224)),
        (1, 9, 0.5, Box(0, 4, 1, 1)),
    ],
)
def test_centre(height: int, width: int, fraction: float, expected: Box) -> None:
    assert central_box(height, width, fraction) == expected


def test_fraction_of_the_tpu_code() -> None:
    assert tpu_fraction(224) == 0.875
    assert [round(tpu_fraction(size), 4) for size in (260, 456)] == [0.8904, 0.9344]
