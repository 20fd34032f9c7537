"""Small images in memory, augmented a batch at a time by shifts, mirroring and cutout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lamb_tpu.data.hashing import below, words
from lamb_tpu.data.source import ArraySource, Batch
from lamb_tpu.errors import out_of_range, unknown

_PAD_MODES: dict[str, Literal["reflect", "constant"]] = {"reflect": "reflect", "zero": "constant"}


@dataclass(frozen=True)
class ArrayOptions:
    """Augmentation of images in training; the defaults change nothing.

    DavidNet, the ResNet-9 of the DAWNBench entry for CIFAR-10, uses pad=4, flip=True, cutout=8.

    Attributes:
      pad: number of pixels added at each side before a random crop of the original size.
      pad_mode: 'reflect', which mirrors the image at its edge without repeating the edge, or
        'zero', which is black.
      flip: whether to mirror each image with probability 1/2.
      cutout: side in pixels of a random square that is filled with the set's mean colour.
    """

    pad: int = 0
    pad_mode: str = "reflect"
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if self.pad_mode not in _PAD_MODES:
            raise unknown("config.data.options.pad_mode", self.pad_mode, _PAD_MODES)

    @property
    def change_nothing(self) -> bool:
        return not (self.pad or self.flip or self.cutout)

    @property
    def numpy_mode(self) -> Literal["reflect", "constant"]:
        """The mode for `numpy.pad`."""
        return _PAD_MODES[self.pad_mode]


class AugmentedArraySource(ArraySource):
    """An `ArraySource` whose images are a function of (seed, epoch, index).

    The field `image` is uint8 (n, height, width, channels); other fields are unchanged.
    """

    in_memory = False  # so that batches are augmented ahead of the step, in threads

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray],
        num_classes: int | None,
        options: ArrayOptions,
        seed: int = 0,
    ) -> None:
        """Raises a UserError if an option does not fit the size of the images."""
        super().__init__(name, arrays, num_classes)
        height, width, channels = self.element_spec["image"].shape
        for option, value, most in (
            ("pad", options.pad, min(height, width) - 1),
            ("cutout", options.cutout, min(height, width)),
        ):
            if not 0 <= value <= most:
                valid = f"0 to {most} for images of {height} by {width} pixels"
                raise out_of_range(f"config.data.options.{option}", value, valid)
        self.options = options
        self._seed = seed
        self.mean = np.zeros(channels, np.uint8)
        if options.cutout:
            self.mean = np.rint(self.arrays["image"].mean((0, 1, 2))).astype(np.uint8)

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Gathers and augments examples, see `Source`."""
        indices = np.asarray(indices, np.int64)
        batch = super().gather(indices)
        draws = self.draws(indices, epochs)
        # `gather` of an ArraySource copies, so the images may be changed in place.
        images, options = batch["image"], self.options
        height, width = images.shape[1:3]
        if options.pad:
            images = _shift(images, options, draws["row"], draws["column"])
        if options.flip:
            mirrored = draws["mirrored"]
            images[mirrored] = images[mirrored, :, ::-1]
        if options.cutout:
            images[cut_square(draws, height, width, options.cutout)] = self.mean
        return {**batch, "image": images}

    def draws(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Returns the random choices that the options need for these examples, each (n,).

        `row` and `column`, int32: start of the crop in the padded image. `mirrored`, bool.
        `cut_row` and `cut_column`, int32: start of the cutout square in the image.
        """
        indices, options = np.asarray(indices, np.int64), self.options
        # Five random words for each image: row and column of the crop, mirroring, row and column of
        # the square. The order is fixed, so an option does not change the other options' draws.
        drawn = words(
            self._seed,
            np.broadcast_to(epochs, indices.shape)[:, None],
            indices[:, None],
            np.arange(5),
        )
        height, width, _ = self.element_spec["image"].shape
        choices: Batch = {}
        if options.pad:
            offsets = 2 * options.pad + 1
            choices["row"], choices["column"] = below(drawn[:, :2], offsets).T
        if options.flip:
            choices["mirrored"] = (drawn[:, 2] >> np.uint64(63)).astype(bool)
        if options.cutout:
            choices["cut_row"] = below(drawn[:, 3], height - options.cutout + 1)
            choices["cut_column"] = below(drawn[:, 4], width - options.cutout + 1)
        return {
            name: value if value.dtype == bool else value.astype(np.int32)
            for name, value in choices.items()
        }


def _shift(
    images: np.ndarray, options: ArrayOptions, row: np.ndarray, column: np.ndarray
) -> np.ndarray:
    sides = ((0, 0), (options.pad, options.pad), (options.pad, options.pad), (0, 0))
    padded = np.pad(images, sides, mode=options.numpy_mode)
    # A view (n, rows, columns, channels, height, width) of all crops; only the chosen crops are
    # copied.
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:3], axis=(1, 2))
    chosen = windows[np.arange(len(images)), row, column]
    return np.ascontiguousarray(chosen.transpose(0, 2, 3, 1))


def cut_square(draws: Mapping[str, Any], height: int, width: int, side: int) -> Any:
    """Returns which pixels the drawn squares cover, bool (n, height, width)."""
    top, left = draws["cut_row"][:, None], draws["cut_column"][:, None]
    rows, columns = np.arange(height), np.arange(width)
    in_rows = (rows >= top) & (rows < top + side)
    in_columns = (columns >= left) & (columns < left + side)
    return in_rows[:, :, None] & in_columns[:, None, :]
