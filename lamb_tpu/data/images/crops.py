"""Crops of images: a random box in training, the centre in evaluation."""

import math
from typing import NamedTuple

import numpy as np

ASPECT_RATIOS = (3 / 4, 4 / 3)  # width / height of a random box
_ATTEMPTS = 10
_PADDING = 32  # pixels; the TPU code crops `size` pixels from an image of `size` + 32 pixels


class Box(NamedTuple):
    """A rectangle; all values are in pixels."""

    top: int
    left: int
    height: int
    width: int


def inception_box(
    height: int,
    width: int,
    rng: np.random.Generator,
    min_area: float = 0.08,
    min_covered: float = 0.1,
) -> Box | None:
    """Draws a box that covers the fraction `min_area` to 1 of an image; its width / height is 3/4 to 4/3.

    This follows `tf.image.sample_distorted_bounding_box`, which the ResNet and EfficientNet code for
    TPUs calls with ten attempts. The aspect ratio is uniform. The height is uniform among the
    heights that fit and give an allowed area. The position is uniform. A box that covers less than
    the fraction `min_covered` of the image is drawn again. (TensorFlow never draws the last row and
    column of positions; here all positions are equally likely.) The idea is from Szegedy et al.,
    "Going Deeper with Convolutions", CVPR 2015.

    Returns None if all attempts fail, for example for an image 20 times as wide as it is high.
    """
    least, most = min_area * height * width, height * width
    for _ in range(_ATTEMPTS):
        ratio = ASPECT_RATIOS[0] + rng.random() * (ASPECT_RATIOS[1] - ASPECT_RATIOS[0])
        # Heights from `low` to `high`: the area is within its bounds, and the rounded width fits.
        high = min(height, math.floor((width + 0.5) / ratio), round(math.sqrt(most / ratio)))
        low = min(high, round(math.sqrt(least / ratio)))
        box_height = low + int(rng.random() * (high - low + 1))
        box_width = round(box_height * ratio)
        if box_height * box_width < least:  # only because of rounding: add one row
            box_height += 1
            box_width = round(box_height * ratio)
        if not (1 <= box_height <= height and 1 <= box_width <= width):
            continue
        area = box_height * box_width
        # Here TensorFlow's object is the full image, so `area / most` is the fraction covered.
        if area < least or area / most < min_covered:
            continue
        position = rng.random()
        top = int(position * (height - box_height + 1))
        left = int(rng.random() * (width - box_width + 1))
        return Box(top, left, box_height, box_width)
    return None


def central_box(height: int, width: int, fraction: float) -> Box:
    """Returns the central square; its side is `fraction` of the shorter side, at least one pixel.

    Scaling the shorter side to 256 and cropping the central 224 pixels corresponds to the fraction
    224/256 = 0.875.
    """
    side = max(1, int(fraction * min(height, width)))
    # Rounded as in `_decode_and_center_crop` of the TPU code.
    return Box((height - side + 1) // 2, (width - side + 1) // 2, side, side)


def tpu_fraction(size: int) -> float:
    """Returns the TPU code's fraction for crops of `size` pixels: 0.875 at 224, 0.934 at 456."""
    return size / (size + _PADDING)
