"""AutoAugment, RandAugment and random erasing, on uint8 images.

All randomness comes from the given generator, so an image's augmentation is a function of the
generator's state. Input images are never changed.

References:
  Cubuk et al., AutoAugment: Learning Augmentation Policies from Data, 2018.
  Cubuk et al., RandAugment: Practical Automated Data Augmentation with a Reduced Search Space,
    2019.
  Zhong et al., Random Erasing Data Augmentation, 2017.
  tensorflow/tpu, models/official/efficientnet/autoaugment.py, for all tables in this file.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lamb_tpu.data.images import operations

Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]
MAX_LEVEL = 10.0


class Operation(NamedTuple):
    """An operation, and its argument as a function of a policy's level, 0 to 10.

    Attributes:
      apply: returns the changed image; called with an image and, unless `kind` is 'none', with the
        argument.
      kind: type of the argument: 'none'; 'number'; 'signed', negated with probability 1/2;
        'integer', truncated to an integer; 'pixel', like 'integer', followed by row and column of a
        random pixel.
      low, high: the argument at levels 0 and 10; it is linear between them.
    """

    apply: Callable[..., np.ndarray]
    kind: str = "none"
    low: float = 0.0
    high: float = 0.0


# RandAugment draws an operation by its index in this table, so changing the order would change the
# result of a seed.
OPERATIONS = {
    "AutoContrast": Operation(operations.autocontrast),
    "Equalize": Operation(operations.equalize),
    "Invert": Operation(operations.invert),
    "Rotate": Operation(operations.rotate, "signed", 0, 30),
    "Posterize": Operation(operations.posterize, "integer", 0, 4),
    "Solarize": Operation(operations.solarize, "integer", 0, 256),
    "Color": Operation(operations.color, "number", 0.1, 1.9),
    "Contrast": Operation(operations.contrast, "number", 0.1, 1.9),
    "Brightness": Operation(operations.brightness, "number", 0.1, 1.9),
    "Sharpness": Operation(operations.sharpness, "number", 0.1, 1.9),
    "ShearX": Operation(operations.shear_x, "signed", 0, 0.3),
    "ShearY": Operation(operations.shear_y, "signed", 0, 0.3),
    "TranslateX": Operation(operations.translate_x, "signed", 0, 100),
    "TranslateY": Operation(operations.translate_y, "signed", 0, 100),
    "Cutout": Operation(operations.cutout, "pixel", 0, 40),
    "SolarizeAdd": Operation(operations.solarize_add, "integer", 0, 110),
}
# AutoAugment translates further along y. Translations are in pixels, whatever the image's size.
AUTOAUGMENT_OPERATIONS = OPERATIONS | {
    "TranslateY": Operation(operations.translate_y, "signed", 0, 250)
}

# The policy v0: one line is drawn for each image. Its steps (operation, probability, level) are
# applied in order, each with its probability.
AUTOAUGMENT = (
    (("Equalize", 0.8, 1), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 3)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 7)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 8)),
    (("Equalize", 0.4, 8), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 2)),
    (("Invert", 0.4, 9), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 9), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 7)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("ShearX", 0.0, 0), ("Solarize", 0.8, 4)),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 4), ("Equalize", 0.0, 8)),
    (("Equalize", 1.0, 4), ("AutoContrast", 0.6, 2)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 1)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)


def make_policy(name: str, num_layers: int, magnitude: float) -> Policy | None:
    """Returns the named policy, a function of an image, uint8 (height, width, 3), and a generator.

    Args:
      name: 'autoaugment', the ImageNet policy v0, which ignores the other arguments;
        'randaugment'; or '', which returns None.
      num_layers: number of operations that RandAugment draws for an image, each from all 16.
      magnitude: level of RandAugment's operations, 0 to 10.
    """
    randaugment = functools.partial(_randaugment, num_layers, magnitude)
    known: dict[str, Policy | None]
    known = {"": None, "autoaugment": autoaugment, "randaugment": randaugment}
    return known[name]


def autoaugment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Applies AutoAugment's ImageNet policy v0 to a uint8 image (height, width, 3)."""
    for name, probability, level in AUTOAUGMENT[rng.integers(len(AUTOAUGMENT))]:
        if rng.random() < probability:
            image = _apply(AUTOAUGMENT_OPERATIONS[name], level, image, rng)
    return image


def _randaugment(
    num_layers: int, magnitude: float, image: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    names = list(OPERATIONS)
    # Draws with replacement: an operation may occur twice.
    for index in rng.integers(len(names), size=num_layers):
        image = _apply(OPERATIONS[names[index]], magnitude, image, rng)
    return image


def random_erasing(image: np.ndarray, rng: np.random.Generator, probability: float) -> np.ndarray:
    """With `probability`, fills a rectangle of the image with random values.

    As in the paper's variant with random values, the fraction of the image that the rectangle
    covers is drawn from 0.02 to 0.4, and its height / width from 0.3 to 1 / 0.3. A rectangle that
    does not fit into the image is drawn again; after 100 draws the image is left unchanged.
    """
    if rng.random() >= probability:
        return image
    height, width = image.shape[:2]
    for _ in range(100):
        area, ratio = rng.uniform(0.02, 0.4) * height * width, rng.uniform(0.3, 1 / 0.3)
        rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < rows < height and 0 < columns < width:
            top, left = rng.integers((height - rows + 1, width - columns + 1))
            image = image.copy()
            image[top : top + rows, left : left + columns] = rng.integers(
                256, size=(rows, columns, 3), dtype=np.uint8
            )
            break
    return image


def _apply(
    operation: Operation, level: float, image: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    value = operation.low + level / MAX_LEVEL * (operation.high - operation.low)
    arguments: tuple[float, ...] = (value,)
    match operation.kind:
        case "none":
            arguments = ()
        case "signed":
            arguments = (value if rng.random() < 0.5 else -value,)
        case "integer":
            arguments = (int(value),)
        case "pixel":
            arguments = (int(value), *rng.integers(image.shape[:2]).tolist())
    return operation.apply(image, *arguments)
