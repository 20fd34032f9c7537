"""A `Source` of encoded images, decoded, cropped and augmented as they are read."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast, get_args

import cv2
import numpy as np

from lamb_tpu.cluster.host import num_cores
from lamb_tpu.data import checking
from lamb_tpu.data.hashing import words
from lamb_tpu.data.images import headers
from lamb_tpu.data.images.crops import Box, central_box, inception_box, tpu_fraction
from lamb_tpu.data.images.jpeg import MAX_PIXELS, BadImage, Resize, decode_crop
from lamb_tpu.data.images.policies import make_policy, random_erasing
from lamb_tpu.data.images.records import Record, Records
from lamb_tpu.data.images.tally import Tally
from lamb_tpu.data.source import BaseSource, Batch, FieldSpec, zeros
from lamb_tpu.errors import UserError, out_of_range, unknown

_PAD = 4  # pixels that the crop "pad" adds at each side
_CHUNK = 16  # examples per task of a thread
_MOST_IN_A_ROW = 100  # consecutive bad records, after which reading stops


@dataclass(frozen=True)
class ImageOptions:
    """Options of crops, augmentation and bad records.

    Attributes:
      size: height and width of the result, in pixels.
      crop: crop in training. 'inception': a random box (`crops.inception_box`); if no box fits or
        the box is the full image, the centre, as in the TPU code. 'pad': the centre, padded with 4
        black pixels at each side and cropped at random, as is usual for small images. 'none': the
        centre. Evaluation always uses the centre.
      min_area: the smallest area of a box of 'inception', as a fraction of the image.
      min_covered: the fraction of the image that a box of 'inception' must cover; a smaller box is
        drawn again, up to ten draws in all.
      resize: 'bilinear', with averaging of large images, or 'bicubic', as in the TPU code; see
        `jpeg.decode_crop`.
      flip: whether to mirror each image in training with probability 1/2.
      central_fraction: side of the centre as a fraction of the image's shorter side; 0 means
        size / (size + 32), as in the ResNet and EfficientNet code for TPUs.
      policy: augmentation in training: '', 'autoaugment' or 'randaugment'.
      policy_layers, policy_magnitude: arguments of 'randaugment'.
      erasing: probability that a random rectangle is filled with noise in training.
      on_bad_record: 'error': a bad record stops the run. 'skip': bad records are counted and named;
        training uses the next good example instead, evaluation leaves them out.
      max_megapixels: maximum size of an ordinary JPEG, in millions of pixels; larger images are bad.
        Decoding an ordinary JPEG takes 6 bytes per pixel. Formats that need more have a lower limit,
        so that no image takes more than 6 MB times `max_megapixels`: PNG, BMP and CMYK JPEGs take 7
        bytes per pixel, JPEGs in several scans (progressive) 9, or 12 in CMYK, and WebP 16.
      holdout: for a folder without a split for evaluation, the fraction of its images that is used
        for evaluation and not for training.
      num_classes: labels are 0 to `num_classes - 1`. 0 uses the number of classes in the set; give
        a number if a folder lacks some of the network's classes.
      threads: number of threads that decode at the same time; 0 is one for each CPU core.
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
        for name, chosen, known in (
            ("crop", self.crop, ("inception", "pad", "none")),
            ("resize", self.resize, get_args(Resize)),
            ("policy", self.policy, ("", "autoaugment", "randaugment")),
            ("on_bad_record", self.on_bad_record, ("error", "skip")),
        ):
            if chosen not in known:
                raise unknown(f"config.data.options.{name}", chosen, known)
        checking.check_options(
            self,
            size=(8, 2**14),
            min_covered=(0, 1),
            central_fraction=(0, 1),
            policy_layers=(1, 100),
            policy_magnitude=(0, 10),
            erasing=(0, 1),
            num_classes=(0, 2**31 - 1),
            threads=(0, 2**10),
        )
        for name, is_valid, valid in (
            ("holdout", 0 <= self.holdout < 1, "at least 0 and less than 1"),
            ("max_megapixels", 0 < self.max_megapixels < math.inf, "a number above 0"),
            ("min_area", 0 < self.min_area <= 1, "more than 0 and at most 1"),
        ):
            if not is_valid:
                raise out_of_range(f"config.data.options.{name}", getattr(self, name), valid)


class ImageSource(BaseSource):
    """A `Source` whose training examples are a function of (seed, epoch, index) alone.

    Examples do not depend on the threads or processes that read them, nor on the order of reading.
    Evaluation has no randomness and takes the centre of each image.

    Fields of an example: `image`, uint8 (size, size, 3), RGB; `label`, int32 ().
    """

    num_classes: int
    tally: Tally

    def __init__(
        self,
        name: str,
        records: Records,
        options: ImageOptions,
        seed: int = 0,
        training: bool = True,
    ) -> None:
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
        self._policy = make_policy(options.policy, options.policy_layers, options.policy_magnitude)
        # The threads start at the first batch.
        self._pool = ThreadPoolExecutor(options.threads or num_cores(), "decode")

    def __len__(self) -> int:
        return len(self.records)

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Gathers examples, see `Source`; evaluation adds `mask`, which is 0 for a bad record.

        Raises:
          UserError: a record is bad and is not skipped, or too many records in a row are bad.
        """
        indices = np.asarray(indices, np.int64)
        seeds = words(self._seed, np.broadcast_to(epochs, indices.shape), indices)
        # Threads fill disjoint rows of these arrays, so no lock is needed.
        batch = zeros(self, len(indices))
        images, labels = batch["image"], batch["label"]
        mask = np.empty(len(indices), np.float32)

        def fill(start: int) -> None:
            chunk = indices[start : start + _CHUNK].tolist()
            for row, (index, record) in enumerate(zip(chunk, self.records.read(chunk)), start):
                seed = int(seeds[row])
                images[row], labels[row], mask[row] = self._example(index, record, seed)

        # `map` yields in order, so the first of several bad records is always the one reported.
        list(self._pool.map(fill, range(0, len(indices), _CHUNK)))
        return batch if self._training else batch | {"mask": mask}

    def _example(self, index: int, record: Record, seed: int) -> tuple[np.ndarray, int, bool]:
        """Returns (image, label, whether `index` is good); the next good example replaces a bad example."""
        for attempt in range(1, _MOST_IN_A_ROW + 1):
            try:
                if record.problem:
                    raise BadImage(record.problem)
                if not 0 <= record.label < self.num_classes:
                    raise BadImage(
                        f"its label is {record.label}, out of the range 0 to {self.num_classes - 1}"
                    )
                # `seed` belongs to the requested example, so a replacement also differs in each
                # epoch and is a function of (seed, epoch, index).
                return self._image(index, record.content, seed), record.label, attempt == 1
            except BadImage as bad:
                name = self.records.name(index)
                if self._options.on_bad_record == "error":
                    key, option = (
                        f"{name} of data set {self.name}",
                        "config.data.options.on_bad_record",
                    )
                    remedy = f"correct it, or skip such records with {option}='skip'"
                    raise UserError(key, ..., f"is bad: {bad}", remedy) from None
                self.tally.skip(index, name, str(bad))
            # Tries the next index, so that the replacement is the same in all processes and runs.
            index = (index + 1) % len(self)
            (record,) = self.records.read([index])
        problem = f"has {attempt} bad records in a row, the last of which is {name}"
        raise UserError(f"data set {self.name}", ..., problem, "correct or remove them")

    def _image(self, index: int, content: bytes, seed: int) -> np.ndarray:
        # Creating an SFC64 takes a fifth of the time of creating NumPy's default generator.
        rng = np.random.Generator(np.random.SFC64(seed)) if self._training else None
        choose = functools.partial(self._choose, rng)
        resize = cast(Resize, self._options.resize)
        image, kind = decode_crop(content, choose, self._options.size, self.max_pixels, resize)
        if kind != "rgb":
            self.tally.add(kind, index)
        if headers.is_rotated(content):
            self.tally.add("rotated", index)
        return image if rng is None else self._augment(image, rng)

    def _choose(self, rng: np.random.Generator | None, height: int, width: int) -> Box:
        options, box = self._options, None
        if rng is not None and options.crop == "inception":
            box = inception_box(height, width, rng, options.min_area, options.min_covered)
        # The TPU code's `_decode_and_random_crop` also treats a box of the full image as a failure.
        if box is None or (box.height, box.width) == (height, width):
            return central_box(height, width, self._fraction)
        return box

    def _augment(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        options = self._options
        if options.crop == "pad":
            padded = np.pad(image, ((_PAD, _PAD), (_PAD, _PAD), (0, 0)))
            top, left = (int(rng.random() * (2 * _PAD + 1)) for _ in range(2))
            image = padded[top : top + options.size, left : left + options.size]
        if options.flip and rng.random() < 0.5:
            image = cv2.flip(image, 1)  # many times faster than NumPy
        if self._policy is not None:
            image = self._policy(np.ascontiguousarray(image), rng)
        if options.erasing:
            image = random_erasing(image, rng, options.erasing)
        return image
