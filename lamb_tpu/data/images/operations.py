"""The elementary operations of AutoAugment and RandAugment.

Each takes an image, uint8 (height, width, 3) in the order RGB, and gives a new one of the same
shape; the one it is given stays as it is. They are defined as in Pillow, which the operations of
TensorFlow's TPU code for EfficientNet are meant to equal, but for two things. Values that a factor
makes are rounded, where both of those cut them off: a grey level at most. And shears are
TensorFlow's, which leaves the first row or column in its place: Pillow counts from the corner of
the image, which moves all by half of `share` more. What was outside a moved image is 128.

References:
  tensorflow/tpu, models/official/efficientnet/autoaugment.py.
"""

import math
from collections.abc import Sequence

import cv2
import numpy as np

FILL = 128
_LEVELS = np.arange(256)
_GREY = np.array([0.299, 0.587, 0.114])  # of red, green and blue in a grey level
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretches each channel so that its darkest value becomes 0 and its brightest 255.

    A channel of one value stays.
    """
    low, high = (edge.astype(np.float64) for edge in (image.min((0, 1)), image.max((0, 1))))
    scale, levels = 255 / np.maximum(high - low, 1), _LEVELS[:, None]
    stretched = np.clip(levels * scale - low * scale, 0, 255)
    return _looked_up(image, np.where(high > low, stretched, levels))


def equalize(image: np.ndarray) -> np.ndarray:
    """Spreads the values of each channel so that all are about equally frequent."""
    tables = []
    for channel in range(3):
        counts = np.bincount(image[..., channel].ravel(), minlength=256)
        # Pixels for each of the 255 steps, those of the brightest value aside.
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        below = np.cumsum(counts) - counts
        tables.append(np.minimum((step // 2 + below) // step, 255) if step else _LEVELS)
    return _looked_up(image, np.stack(tables, 1))


def invert(image: np.ndarray) -> np.ndarray:
    """255 minus each value."""
    return 255 - image


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keeps the highest bits of each value.

    Args:
      image: uint8 (height, width, 3).
      bits: 0 to 8. Of 0 one is kept: TensorFlow shifts a byte by 7 at most, and so does this.
    """
    return image & np.uint8(0xFF << (8 - max(bits, 1)) & 0xFF)


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Inverts the values that are not below the threshold, 0 to 256."""
    return _looked_up(image, np.where(_LEVELS < threshold, _LEVELS, 255 - _LEVELS))


def solarize_add(image: np.ndarray, addition: int) -> np.ndarray:
    """Adds to the values below 128, up to 255."""
    added = np.minimum(_LEVELS + addition, 255)
    return _looked_up(image, np.where(_LEVELS < 128, added, _LEVELS))


def color(image: np.ndarray, factor: float) -> np.ndarray:
    """Moves from the grey image, factor 0, to the image itself, 1, and beyond."""
    return cv2.transform(image, factor * np.eye(3) + (1 - factor) * _GREY)


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """The same from the mean grey level of the image.

    The TPU code starts from a 256th of the number of pixels, at most 255, and thereby 196 for all
    images of 224 x 224 pixels; it says that it means the mean.
    """
    mean = math.floor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean() + 0.5)
    return _looked_up(image, np.clip(np.rint(mean + factor * (_LEVELS - mean)), 0, 255))


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """The same from black."""
    return _looked_up(image, np.minimum(np.rint(factor * _LEVELS), 255))


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """The same from the image smoothed by a 3 x 3 filter; the outermost pixels stay."""
    smooth = cv2.filter2D(image, -1, _SMOOTH)
    smooth[[0, -1]] = image[[0, -1]]
    smooth[:, [0, -1]] = image[:, [0, -1]]
    return cv2.addWeighted(smooth, 1 - factor, image, factor, 0)


def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """Turns the image about its centre, counter-clockwise as it is looked at."""
    height, width = image.shape[:2]
    x, y = (width - 1) / 2, (height - 1) / 2
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _moved(image, (cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))


def shear_x(image: np.ndarray, share: float) -> np.ndarray:
    """Moves row y to the left by `share` * y pixels; Pillow: by `share` * (y + 0.5)."""
    return _moved(image, (1, share, 0), (0, 1, 0))


def shear_y(image: np.ndarray, share: float) -> np.ndarray:
    """Moves column x upwards by `share` * x pixels; Pillow: by `share` * (x + 0.5)."""
    return _moved(image, (1, 0, 0), (share, 1, 0))


def translate_x(image: np.ndarray, pixels: float) -> np.ndarray:
    """Moves the image to the left."""
    return _moved(image, (1, 0, pixels), (0, 1, 0))


def translate_y(image: np.ndarray, pixels: float) -> np.ndarray:
    """Moves the image upwards."""
    return _moved(image, (1, 0, 0), (0, 1, pixels))


def cutout(image: np.ndarray, half: int, row: int, column: int) -> np.ndarray:
    """Fills a square of 2 `half` pixels a side about a place with 128, as far as it is inside."""
    image = image.copy()
    image[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = FILL
    return image


def _looked_up(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The image with each value v replaced by table[v], or by table[v, channel]; cut to uint8."""
    return cv2.LUT(image, table.astype(np.uint8).reshape(1, 256, -1))


def _moved(image: np.ndarray, x: Sequence[float], y: Sequence[float]) -> np.ndarray:
    """Each pixel taken from the nearest to where a linear function of (x, y, 1) points."""
    height, width = image.shape[:2]
    return cv2.warpAffine(
        image, np.array([x, y], np.float64), (width, height),
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT, borderValue=(FILL,) * 3,
    )
