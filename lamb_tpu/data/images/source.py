"""A `Source` of encoded pictures, decoded, cropped and augmented while they are read."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast, get_args

import cv2
import numpy as np

from lamb_tpu.cluster.host import num_cores
from lamb_tpu.data.hashing import words
from lamb_tpu.data.images import headers
from lamb_tpu.data.images.crops import Box, central_box, inception_box, tpu_fraction
from lamb_tpu.data.images.jpeg import MAX_PIXELS, BadImage, Resize, decode_crop
from lamb_tpu.data.images.policies import make_policy, random_erasing
from lamb_tpu.data.images.records import Record, Records
from lamb_tpu.data.images.tally import Tally
from lamb_tpu.data.source import BaseSource, Batch, FieldSpec
from lamb_tpu.errors import UserError

CROPS = ("inception", "pad", "none")
RESIZES = get_args(Resize)
_PAD = 4  # pixels that the crop "pad" adds at each side
_CHUNK = 16  # examples that a thread takes at a time
_MOST_IN_A_ROW = 100  # bad records in a row, after which the set does not count as pictures


@dataclass(frozen=True)
class Options:
    """Options of crops, augmentation and bad records.

    Attributes:
      size: height and width of the result, in pixels.
      crop: crop in training. 'inception': a random box (`crops.inception_box`; if there is none, or
        it is the whole picture, the centre, as in the TPU code). 'pad': the centre, shifted by up
        to 4 pixels in each direction over black, as is usual for small pictures. 'none': the
        centre. Evaluation always takes the centre.
      min_area: the smallest area of a box of 'inception', as a share of the picture.
      min_covered: the least share of the picture in a box; smaller boxes are drawn again, up to ten
        times.
      resize: 'bilinear', with averaging of large pictures, or 'bicubic', as in the TPU code; see
        `jpeg.decode_crop`.
      flip: mirror half of the pictures in training, at random.
      central_fraction: side of the centre as a share of the shorter side; 0 takes
        size / (size + 32), as in the ResNet and EfficientNet code for TPUs.
      policy: augmentation in training: '', 'autoaugment' or 'randaugment'.
      policy_layers, policy_magnitude: arguments of 'randaugment'.
      erasing: probability that a random rectangle is filled with noise in training.
      on_bad_record: 'error': a bad record ends the run. 'skip': it is counted and named; training
        takes the next good example instead, evaluation leaves it out.
      max_megapixels: a picture with more millions of pixels in its header is bad. A decoded million
        takes 3 MB.
      holdout: for a folder without a split for evaluation, the share of its pictures that is
        excluded from training and evaluated.
      num_classes: labels are 0 to `num_classes - 1`. 0 takes the number from the set; a folder may
        not have all classes that a network knows.
      threads: number of threads that decode at the same time; 0 is one for each core.
    """

    size: int = 224
    crop: str = "inception"
    min_area: float = 0.08
    min_covered: float = 0.1
    resize: str = "bilinear"
    flip: bool = True
    central_fraction: float = 0.875
    policy: str = ""
    policy_layers: int = 2
    policy_magnitude: float = 10.0
    erasing: float = 0.0
    on_bad_record: str = "error"
    max_megapixels: float = MAX_PIXELS / 1e6
    holdout: float = 0.0
    num_classes: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        for name, found, known in (
            ("crop", self.crop, CROPS),
            ("resize", self.resize, RESIZES),
            ("policy", self.policy, ("", "autoaugment", "randaugment")),
            ("on_bad_record", self.on_bad_record, ("error", "skip")),
        ):
            if found not in known:
                listed = ", ".join(map(repr, known))
                raise UserError(f"config.data.options.{name} is {found!r}; known are {listed}")
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("size", self.size, 8, 2**14),
            ("min_covered", self.min_covered, 0, 1),
            ("central_fraction", self.central_fraction, 0, 1),
            ("policy_layers", self.policy_layers, 1, 100),
            ("policy_magnitude", self.policy_magnitude, 0, 10),
            ("erasing", self.erasing, 0, 1),
            ("num_classes", self.num_classes, 0, 2**31 - 1),
            ("threads", self.threads, 0, 2**10),
        )
        for name, value, least, most in bounds:
            if not least <= value <= most:
                raise UserError(
                    f"config.data.options.{name} must lie in {least}..{most}, found {value}"
                )
        if not 0 <= self.holdout < 1:
            raise UserError(
                "config.data.options.holdout must be at least 0 and less than 1, found "
                f"{self.holdout}"
            )
        if not 0 < self.max_megapixels < float("inf"):
            raise UserError(
                "config.data.options.max_megapixels must be a number above 0, found "
                f"{self.max_megapixels}"
            )
        if not 0 < self.min_area <= 1:
            raise UserError(
                "config.data.options.min_area must be more than 0 and at most 1, found "
                f"{self.min_area}"
            )


class ImageSource(BaseSource):
    """A `Source` whose training examples are a function of (seed, epoch, index) alone.

    Neither the threads nor the processes that read, nor the order in which they do, change an
    example. Evaluation has no randomness.

    Fields of an example:
      image: uint8 (size, size, 3), RGB.
      label: int32 ().

    Attributes, besides those of `Source`:
      records: the encoded pictures.
      max_pixels: the largest number of pixels of a picture that is decoded.
      tally: counts of odd and damaged pictures.
    """

    num_classes: int
    tally: Tally

    def __init__(
        self, name: str, records: Records, options: Options, seed: int = 0, training: bool = True
    ) -> None:
        """Stores the arguments; nothing is read yet.

        Args:
          name: see `Source`.
          records: the encoded pictures.
          options: crops, augmentation and treatment of bad records.
          seed: seed of the random choices, 0 to 2**64 - 1.
          training: whether crops and augmentation are random; otherwise the centre is taken.
        """
        self.name = name
        self.num_classes = records.num_classes
        self.notes = records.notes
        self.element_spec = {
            "image": FieldSpec((options.size, options.size, 3), np.dtype(np.uint8)),
            "label": FieldSpec((), np.dtype(np.int32)),
        }
        self.tally = Tally(name, training)
        self.records = records
        self.max_pixels = int(options.max_megapixels * 1e6)
        self._options = options
        self._seed = seed
        self._training = training
        self._fraction = options.central_fraction or tpu_fraction(options.size)
        self._policy = None
        if options.policy:
            self._policy = make_policy(
                options.policy, options.policy_layers, options.policy_magnitude
            )
        self._threads = options.threads or num_cores()
        # The threads start with the first batch.
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")

    def __len__(self) -> int:
        return len(self.records)

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Gathers examples, see `Source`; in evaluation with `mask`, which is 0 for a bad record.

        Raises:
          UserError: a record is bad and the options do not skip it, or too many in a row are bad.
        """
        indices = np.asarray(indices, np.int64)
        seeds = words(self._seed, np.broadcast_to(epochs, indices.shape), indices)
        # Threads fill disjoint rows of these arrays, so they need no lock.
        images = np.empty((len(indices), *self.element_spec["image"].shape), np.uint8)
        labels = np.empty(len(indices), np.int32)
        mask = np.empty(len(indices), np.float32)

        def fill(start: int) -> None:
            chunk = indices[start : start + _CHUNK].tolist()
            for place, (index, record) in enumerate(zip(chunk, self.records.read(chunk)), start):
                seed = int(seeds[place])
                images[place], labels[place], mask[place] = self._example(index, record, seed)

        # In order, so that of several bad records the first is always the one reported.
        for _ in self._pool.map(fill, range(0, len(indices), _CHUNK)):
            pass
        batch: Batch = {"image": images, "label": labels}
        return batch if self._training else batch | {"mask": mask}

    def _example(self, index: int, record: Record, seed: int) -> tuple[np.ndarray, int, bool]:
        """Returns the example or the next good one, and whether it is the example itself."""
        for attempt in range(1, _MOST_IN_A_ROW + 1):
            try:
                if record.problem:
                    raise BadImage(record.problem)
                if not 0 <= record.label < self.num_classes:
                    raise BadImage(
                        f"its label is {record.label}, out of the range 0 to {self.num_classes - 1}"
                    )
                # `seed` remains that of the example asked for, so a replacement is random anew in
                # each epoch and still a function of (seed, epoch, index).
                return self._image(index, record.content, seed), record.label, attempt == 1
            except BadImage as bad:
                name = self.records.name(index)
                if self._options.on_bad_record == "error":
                    raise UserError(
                        f"data set {self.name}: {name} is bad: {bad}; mend or remove it, or go on "
                        "without such records with config.data.options.on_bad_record='skip'"
                    ) from None
                self.tally.skip(index, name, str(bad))
            # The neighbour is the same for all processes and in every run.
            index = (index + 1) % len(self)
            (record,) = self.records.read([index])
        raise UserError(
            f"data set {self.name}: {attempt} records in a row are bad, the last is {name}"
        )

    def _image(self, index: int, content: bytes, seed: int) -> np.ndarray:
        # Creating SFC64 takes a fifth of the time of NumPy's default generator.
        rng = np.random.Generator(np.random.SFC64(seed)) if self._training else None
        options = self._options
        image, kind = decode_crop(
            content, self._choose(rng), options.size, self.max_pixels, cast(Resize, options.resize)
        )
        if kind != "rgb":
            self.tally.add(kind, index)
        if headers.is_rotated(content):
            self.tally.add("rotated", index)
        return image if rng is None else self._augment(image, rng)

    def _choose(self, rng: np.random.Generator | None) -> Callable[[int, int], Box]:
        if rng is None or self._options.crop != "inception":
            return functools.partial(central_box, fraction=self._fraction)

        # A function, because the size of a picture is known only when its header is read.
        def choose(height: int, width: int) -> Box:
            options = self._options
            box = inception_box(height, width, rng, options.min_area, options.min_covered)
            # As in the TPU code, whose `_decode_and_random_crop` takes a box of the whole picture
            # as a failure.
            if box is None or (box.height, box.width) == (height, width):
                return central_box(height, width, self._fraction)
            return box

        return choose

    def _augment(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        options = self._options
        if options.crop == "pad":
            padded = np.pad(image, ((_PAD, _PAD), (_PAD, _PAD), (0, 0)))
            top, left = (int(rng.random() * (2 * _PAD + 1)) for _ in range(2))
            image = padded[top : top + options.size, left : left + options.size]
        if options.flip and rng.random() < 0.5:
            image = cv2.flip(image, 1)  # many times as fast as NumPy
        if self._policy is not None:
            image = self._policy(np.ascontiguousarray(image), rng)
        if options.erasing:
            image = random_erasing(image, rng, options.erasing)
        return image
