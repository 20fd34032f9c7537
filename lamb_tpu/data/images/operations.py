"""The elementary operations of AutoAugment and RandAugment.

Each operation takes an image, uint8 (height, width, 3) in RGB, and returns a new image of the same
shape. The operations follow Pillow, as those of TensorFlow's EfficientNet code for TPUs are meant
to, with two exceptions. Values multiplied by a factor are rounded; Pillow and TensorFlow
truncate them, so the results differ by at most one grey level. Shears follow TensorFlow, which leaves
the first row or column unchanged; Pillow measures from the corner of the image, so its shears move
everything by `share` / 2 pixels more. Pixels from outside the image are 128.

References:
  tensorflow/tpu, models/official/efficientnet/autoaugment.py.
"""

import math
from collections.abc import Sequence

import cv2
import numpy as np

FILL = 128
_LEVELS = np.arange(256)
# ITU-R BT.601, as in Pillow and OpenCV.
_GREY = np.array([0.299, 0.587, 0.114])  # weights of red, green and blue in a grey level
# Pillow's filter SMOOTH.
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretches each channel so that its darkest value becomes 0 and its brightest 255.

    A channel with a single value is left unchanged.
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
        # Number of pixels for each of the 255 steps, without the pixels of the brightest value.
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        below = np.cumsum(counts) - counts
        # A channel with nearly all pixels at its brightest value is left unchanged.
        tables.append(np.minimum((step // 2 + below) // step, 255) if step else _LEVELS)
    return _looked_up(image, np.stack(tables, 1))


def invert(image: np.ndarray) -> np.ndarray:
    """Replaces each value v by 255 - v."""
    return 255 - image


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keeps the `bits` highest bits of each value, but at least 1: TensorFlow shifts by at most 7."""
    return image & np.uint8(0xFF << (8 - max(bits, 1)) & 0xFF)


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Inverts values at or above the threshold, which is 0 to 256."""
    return _looked_up(image, np.where(_LEVELS < threshold, _LEVELS, 255 - _LEVELS))


def solarize_add(image: np.ndarray, addition: int) -> np.ndarray:
    """Adds `addition` to the values below 128; a sum above 255 becomes 255."""
    added = np.minimum(_LEVELS + addition, 255)
    return _looked_up(image, np.where(_LEVELS < 128, added, _LEVELS))


def color(image: np.ndarray, factor: float) -> np.ndarray:
    """Interpolates from the grey image (factor 0) to the image (factor 1), and beyond."""
    return cv2.transform(image, factor * np.eye(3) + (1 - factor) * _GREY)


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Interpolates from the image's mean grey level (factor 0) to the image (factor 1), and beyond.

    Despite its comment, the TPU code does not use the mean but a 256th of the number of pixels, at
    most 255: 196 for all images of 224 x 224 pixels.
    """
    # Rounded as in Pillow's ImageEnhance.Contrast.
    mean = math.floor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean() + 0.5)
    return _looked_up(image, np.clip(np.rint(mean + factor * (_LEVELS - mean)), 0, 255))


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Interpolates from black (factor 0) to the image (factor 1), and beyond."""
    return _looked_up(image, np.minimum(np.rint(factor * _LEVELS), 255))


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Interpolates from the smoothed image (factor 0) to the image (factor 1), and beyond.

    The smoothing filter has 3 x 3 pixels. The outermost pixels are left unchanged.
    """
    smooth = cv2.filter2D(image, -1, _SMOOTH)
    smooth[[0, -1]] = image[[0, -1]]
    smooth[:, [0, -1]] = image[:, [0, -1]]
    return cv2.addWeighted(smooth, 1 - factor, image, factor, 0)


def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """Rotates the image about its centre, counter-clockwise."""
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
    """Moves the image to the left by `pixels`."""
    return _moved(image, (1, 0, pixels), (0, 1, 0))


def translate_y(image: np.ndarray, pixels: float) -> np.ndarray:
    """Moves the image upwards by `pixels`."""
    return _moved(image, (1, 0, 0), (0, 1, pixels))


def cutout(image: np.ndarray, half: int, row: int, column: int) -> np.ndarray:
    """Fills a square of side 2 * `half` around a pixel with 128, clipped at the image's edges."""
    image = image.copy()
    image[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = FILL
    return image


def _looked_up(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Replaces each value v with table[v] or table[v, channel], clipped to uint8."""
    return cv2.LUT(image, table.astype(np.uint8).reshape(1, 256, -1))


def _moved(image: np.ndarray, x: Sequence[float], y: Sequence[float]) -> np.ndarray:
    """Moves pixels: result pixel p = (column, row, 1) is the image pixel nearest to (x . p, y . p)."""
    height, width = image.shape[:2]
    # With WARP_INVERSE_MAP the matrix maps a pixel of the result to a pixel of the image.
    return cv2.warpAffine(
        image,
        np.array([x, y], np.float64),
        (width, height),
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=(FILL,) * 3,
    )
