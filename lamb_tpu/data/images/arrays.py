"""Small pictures in memory, shifted, mirrored and cut a whole batch at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lamb_tpu.data.hashing import below, words
from lamb_tpu.data.source import ArraySource, Batch
from lamb_tpu.errors import UserError

_PAD_MODES: dict[str, Literal["reflect", "constant"]] = {"reflect": "reflect", "zero": "constant"}


@dataclass(frozen=True)
class ArrayOptions:
    """Augmentation of pictures in training; the defaults change nothing.

    DavidNet, the ResNet-9 of the DAWNBench entry for CIFAR-10, has pad=4, flip=True, cutout=8.

    Attributes:
      pad: pixels added at each side before a random crop of the old size.
      pad_mode: 'reflect', which mirrors the picture at its edge without repeating the edge, or
        'zero', which is black.
      flip: mirror half of the pictures, at random.
      cutout: side of a random square in the picture that is filled with the set's mean colour.
    """

    pad: int = 0
    pad_mode: str = "reflect"
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if self.pad_mode not in _PAD_MODES:
            raise UserError(
                f"config.data.options.pad_mode is {self.pad_mode!r}; known are "
                f"{', '.join(map(repr, _PAD_MODES))}"
            )

    @property
    def change_nothing(self) -> bool:
        return not (self.pad or self.flip or self.cutout)


class AugmentedArraySource(ArraySource):
    """An `ArraySource` whose pictures are a function of (seed, epoch, index).

    The field `image` is uint8 (n, height, width, channels); the others are left as they are.
    """

    in_memory = False  # the arrays are, but augmentation is work that should overlap with the step

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray],
        num_classes: int | None,
        options: ArrayOptions,
        seed: int = 0,
    ) -> None:
        """Computes the mean colour if `cutout` needs it.

        Raises:
          UserError: an option does not fit the size of the pictures.
        """
        super().__init__(name, arrays, num_classes)
        height, width, channels = self.element_spec["image"].shape
        for option, found, most in (
            ("pad", options.pad, min(height, width) - 1),
            ("cutout", options.cutout, min(height, width)),
        ):
            if not 0 <= found <= most:
                raise UserError(
                    f"config.data.options.{option} must lie in 0..{most} for pictures of {height} "
                    f"by {width} pixels, found {found}"
                )
        self._options = options
        self._seed = seed
        self._mean = np.zeros(channels, np.uint8)
        if options.cutout:
            self._mean = np.rint(self.arrays["image"].mean((0, 1, 2))).astype(np.uint8)

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Gathers and augments examples, see `Source`."""
        indices = np.asarray(indices, np.int64)
        batch = super().gather(indices)
        # Five random words for each picture: row and column of the crop, the mirror, row and column
        # of the square. Each has its place, so an option does not change the others' draws.
        draws = words(
            self._seed,
            np.broadcast_to(epochs, indices.shape)[:, None],
            indices[:, None],
            np.arange(5),
        )
        # `gather` of an ArraySource copies, so the pictures may be changed in place.
        images, options = batch["image"], self._options
        height, width = images.shape[1:3]
        if options.pad:
            images = _shift(images, options, draws[:, 0], draws[:, 1])
        if options.flip:
            mirrored = (draws[:, 2] >> np.uint64(63)).astype(bool)
            images[mirrored] = images[mirrored, :, ::-1]
        if options.cutout:
            rows, columns = (
                _inside(draw, side, options.cutout)
                for draw, side in ((draws[:, 3], height), (draws[:, 4], width))
            )
            images[rows[:, :, None] & columns[:, None, :]] = self._mean
        return {**batch, "image": images}


def _shift(
    images: np.ndarray, options: ArrayOptions, row_draw: np.ndarray, column_draw: np.ndarray
) -> np.ndarray:
    sides = ((0, 0), (options.pad, options.pad), (options.pad, options.pad), (0, 0))
    padded = np.pad(images, sides, mode=_PAD_MODES[options.pad_mode])
    # A view (n, rows, columns, channels, height, width) of all crops; only the chosen ones are
    # copied.
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:3], axis=(1, 2))
    places = 2 * options.pad + 1
    chosen = windows[np.arange(len(images)), below(row_draw, places), below(column_draw, places)]
    return np.ascontiguousarray(chosen.transpose(0, 2, 3, 1))


def _inside(draw: np.ndarray, side: int, length: int) -> np.ndarray:
    """Returns the rows or columns that a random interval of `length` covers, bool (n, side)."""
    start = below(draw, side - length + 1)[:, None]
    places = np.arange(side)
    return (places >= start) & (places < start + length)
