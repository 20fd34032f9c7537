"""The operations of the policies, compared with Pillow or with explicit formulas."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from lamb_tpu.data.images import operations
from tests.shared import shared


@pytest.fixture(scope="module", params=["made", "photograph"])
def image(request: pytest.FixtureRequest) -> np.ndarray:
    """Noise on a gradient with a different range for each channel; or a real photograph."""
    if request.param == "photograph":
        path = shared("data", "imagenet_sample", "n01440764_tench.JPEG")
        return np.asarray(Image.open(path).convert("RGB"))
    rng = np.random.default_rng(0)
    gradient = np.linspace(20, 230, 61)[:, None, None] * np.array([1.0, 0.6, 0.3])
    noisy = gradient + rng.normal(0, 12, (61, 47, 3))
    return np.clip(noisy, 0, 240).astype(np.uint8)


def grey_levels(actual: np.ndarray, expected: Any) -> int:
    assert actual.dtype == np.uint8
    return int(np.abs(actual.astype(int) - np.asarray(expected)).max())


@pytest.mark.parametrize(
    "name, of_pillow",
    [
        ("autocontrast", ImageOps.autocontrast),
        ("equalize", ImageOps.equalize),
        ("invert", ImageOps.invert),
    ],
)
def test_plain_operations(image: np.ndarray, name: str, of_pillow: Callable[..., Any]) -> None:
    actual = getattr(operations, name)(image)
    assert grey_levels(actual, of_pillow(Image.fromarray(image))) == 0
    # The photograph's darkest and brightest values are 0 and 255 already.
    assert grey_levels(actual, image) > 5 or (name == "autocontrast" and np.ptp(image) == 255)


@pytest.mark.parametrize(
    "name, of_pillow, arguments",
    [
        ("posterize", ImageOps.posterize, (1, 2, 3, 4, 8)),
        ("solarize", ImageOps.solarize, (0, 1, 76, 128, 255, 256)),
    ],
)
def test_of_a_number(
    image: np.ndarray, name: str, of_pillow: Callable[..., Any], arguments: tuple[int, ...]
) -> None:
    actual = [getattr(operations, name)(image, argument) for argument in arguments]
    for argument, one in zip(arguments, actual, strict=True):
        assert grey_levels(one, of_pillow(Image.fromarray(image), argument)) == 0
    assert grey_levels(actual[-1], image) == 0 < grey_levels(actual[0], image)


def test_posterize_keeps_one_bit_at_least(image: np.ndarray) -> None:
    np.testing.assert_array_equal(operations.posterize(image, 0), image // 128 * 128)


@pytest.mark.parametrize("addition", [0, 33, 110, 200])
def test_solarize_add(image: np.ndarray, addition: int) -> None:
    expected = image.astype(int)
    expected[expected < 128] += addition
    assert grey_levels(operations.solarize_add(image, addition), expected.clip(0, 255)) == 0


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.46, 1.0, 1.36, 1.9])
@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
def test_factors(image: np.ndarray, name: str, factor: float) -> None:
    actual = getattr(operations, name)(image, factor)
    enhancer = getattr(ImageEnhance, name.capitalize())(Image.fromarray(image))
    assert grey_levels(actual, enhancer.enhance(factor)) <= 1
    assert (grey_levels(actual, image) == 0) == (factor == 1)


def test_factors_round(image: np.ndarray) -> None:
    actual = operations.brightness(image, 0.46)
    assert grey_levels(actual, np.rint(np.float64(image) * 0.46)) == 0
    # By formula: grey is 0.299 R + 0.587 G + 0.114 B.
    grey = image @ np.array([0.299, 0.587, 0.114])
    for factor in (0.1, 1.9):
        expected = np.clip(grey[..., None] + factor * (image - grey[..., None]), 0, 255)
        # OpenCV also rounds the factors, to 1/1,024.
        assert np.abs(operations.color(image, factor) - expected).max() < 0.5 + 3 * 255 / 2048
    mean = math.floor(np.rint(grey).mean() + 0.5)
    expected = np.clip(mean + 1.9 * (np.float64(image) - mean), 0, 255)
    assert grey_levels(operations.contrast(image, 1.9), np.rint(expected)) == 0


def test_contrast_starts_from_the_mean_not_from_the_size() -> None:
    dark = np.full((224, 224, 3), 10, np.uint8)  # 224 * 224 / 256 is 196
    np.testing.assert_array_equal(operations.contrast(dark, 0.1), dark)


MOVES = [
    ("rotate", 17.0),
    ("rotate", -30.0),
    ("shear_x", 0.27),
    ("shear_x", -0.3),
    ("shear_y", 0.12),
    ("translate_x", 13.0),
    ("translate_x", -20.3),
    ("translate_y", 9.0),
    ("translate_y", 1000.0),
]


@pytest.mark.parametrize("name, argument", MOVES)
def test_moves(image: np.ndarray, name: str, argument: float) -> None:
    height, width = image.shape[:2]
    actual = getattr(operations, name)(image, argument)
    # The source position of each pixel: factors of x, y and 1, for its column and for its row.
    cos, sin = math.cos(math.radians(argument)), math.sin(math.radians(argument))
    x, y = (width - 1) / 2, (height - 1) / 2
    (xx, xy, x1), (yx, yy, y1) = {
        "rotate": ((cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y)),
        "shear_x": ((1, argument, 0), (0, 1, 0)),
        "shear_y": ((1, 0, 0), (argument, 1, 0)),
        "translate_x": ((1, 0, argument), (0, 1, 0)),
        "translate_y": ((1, 0, 0), (0, 1, argument)),
    }[name]
    # Pillow measures from the corner of a pixel, this code from its centre.
    corner = (xx, xy, x1 + 0.5 - (xx + xy) / 2, yx, yy, y1 + 0.5 - (yx + yy) / 2)
    drawn = Image.fromarray(image)
    expected = np.asarray(
        drawn.transform(
            drawn.size,
            Image.Transform.AFFINE,
            corner,
            Image.Resampling.NEAREST,
            fillcolor=(128, 128, 128),
        )
    )
    # Half way between two pixels, either may be the nearest.
    column, row = np.meshgrid(np.arange(width), np.arange(height))
    sources = np.stack([xx * column + xy * row + x1, yx * column + yy * row + y1])
    clear = (np.abs(sources % 1 - 0.5) > 0.01).all(0)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(actual[clear], expected[clear])
    if name == "rotate":
        pillows = drawn.rotate(argument, fillcolor=(128, 128, 128))
        assert (actual != np.asarray(pillows)).any(-1).mean() < 0.05
    elif name.startswith("translate"):
        at = (1, 0, x1, 0, 1, y1)
        pillows = drawn.transform(drawn.size, Image.Transform.AFFINE, at, fillcolor=(128, 128, 128))
        np.testing.assert_array_equal(actual, pillows)
    outside = (sources < -0.51).any(0) | (sources[0] > width - 0.49) | (sources[1] > height - 0.49)
    assert outside.any() and (actual[outside] == 128).all()


# Results of TensorFlow 2.21's tf.raw_ops.ImageProjectiveTransformV3 with NEAREST (called by the TPU
# code's contrib_image.transform) for an image with the numbers 1 to 48 in six rows. 128 is a pixel
# from outside the image.
SHEARS = {
    ("shear_x", 0.3): """
        1 2 3 4 5 6 7 8        9 10 11 12 13 14 15 16     18 19 20 21 22 23 24 128
        26 27 28 29 30 31 32 128   34 35 36 37 38 39 40 128   43 44 45 46 47 48 128 128""",
    ("shear_x", -0.27): """
        1 2 3 4 5 6 7 8        9 10 11 12 13 14 15 16     128 17 18 19 20 21 22 23
        128 25 26 27 28 29 30 31   128 33 34 35 36 37 38 39   128 41 42 43 44 45 46 47""",
    ("shear_y", 0.3): """
        1 2 11 12 13 22 23 24      9 10 19 20 21 30 31 32     17 18 27 28 29 38 39 40
        25 26 35 36 37 46 47 48    33 34 43 44 45 128 128 128
        41 42 128 128 128 128 128 128""",
    ("shear_y", -0.27): """
        1 2 128 128 128 128 128 128   9 10 3 4 5 6 128 128    17 18 11 12 13 14 7 8
        25 26 19 20 21 22 15 16    33 34 27 28 29 30 23 24    41 42 35 36 37 38 31 32""",
}


@pytest.mark.parametrize(("name", "share"), SHEARS)
def test_shears_are_tensorflows(name: str, share: float) -> None:
    numbers = np.arange(1, 49, dtype=np.uint8).reshape(6, 8, 1).repeat(3, -1)
    actual = getattr(operations, name)(numbers, share)
    expected = np.array(SHEARS[name, share].split(), int).reshape(6, 8)
    # Half way between two pixels (0.3 * 5), TensorFlow rounds to the further one.
    clear = np.abs(share * np.arange(8) % 1 - 0.5) > 0.01
    mask = clear[None, :] if name == "shear_y" else clear[:6, None]
    mask = np.broadcast_to(mask, (6, 8))
    np.testing.assert_array_equal(actual[mask, 0], expected[mask])


@pytest.mark.parametrize("name", ["shear_x", "shear_y"])
@pytest.mark.parametrize("share", [0.27, -0.29])
def test_shears_are_half_a_share_off_pillow(image: np.ndarray, name: str, share: float) -> None:
    actual, drawn = getattr(operations, name)(image, share), Image.fromarray(image)

    def pillows(offset: float) -> np.ndarray:
        rows = (1, share, offset, 0, 1, 0) if name == "shear_x" else (1, 0, 0, share, 1, offset)
        return np.asarray(
            drawn.transform(drawn.size, Image.Transform.AFFINE, rows, fillcolor=(128, 128, 128))
        )

    assert (pillows(-share / 2) != actual).any(-1).mean() < 0.03  # half way between two pixels
    assert (pillows(0.0) != actual).any(-1).mean() > 0.1


@pytest.mark.parametrize("half, row, column", [(0, 5, 5), (4, 30, 20), (9, 0, 46), (500, 60, 0)])
def test_cutout(image: np.ndarray, half: int, row: int, column: int) -> None:
    actual = operations.cutout(image, half, row, column)
    y, x = np.mgrid[: image.shape[0], : image.shape[1]]
    inside = (y - row >= -half) & (y - row < half) & (x - column >= -half) & (x - column < half)
    expected = np.where(inside[..., None], 128, image)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_channel_of_one_value_stays(name: str) -> None:
    image = np.zeros((8, 8, 3), np.uint8) + np.uint8([0, 77, 255])
    image[:4, :, 0] = 9
    actual = getattr(operations, name)(image)
    np.testing.assert_array_equal(actual[..., 1:], image[..., 1:])
    assert grey_levels(actual, getattr(ImageOps, name)(Image.fromarray(image))) == 0


ALL = [
    ("autocontrast",),
    ("equalize",),
    ("invert",),
    ("posterize", 3),
    ("solarize", 99),
    ("solarize_add", 50),
    ("color", 0.5),
    ("contrast", 0.5),
    ("brightness", 0.5),
    ("sharpness", 0.5),
    *MOVES,
    ("cutout", 9, 3, 3),
]


@pytest.mark.parametrize("call", ALL, ids=str)
def test_image_given_stays_and_may_be_a_view(image: np.ndarray, call: tuple[Any, ...]) -> None:
    name, *arguments = call
    mirrored = image[:, ::-1]  # the strided view that a flip returns
    before = mirrored.copy()
    actual = getattr(operations, name)(mirrored, *arguments)
    np.testing.assert_array_equal(mirrored, before)
    assert not np.shares_memory(actual, image)
    assert actual.shape == image.shape and actual.dtype == np.uint8
    np.testing.assert_array_equal(actual, getattr(operations, name)(before, *arguments))
    one = np.full((1, 1, 3), 200, np.uint8)
    assert getattr(operations, name)(one, *arguments).shape == (1, 1, 3)
