"""Routes from encoded photographs to batches, for `image_throughput.py`.

Each route is a function of (paths, pixels, batch, training). A route uses one thread, and yields
batches of photographs and labels in random order, without end. The photographs are uint8 of shape
(batch, pixels, pixels, 3); torchvision's route puts the channels before the pixels. In training, a
route takes an Inception crop, resizes it bilinearly and flips it at random. In evaluation, a route
takes the central crop whose side is 0.875 times the photograph's shorter side.
"""

import importlib
import io
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from lamb_tpu import data
from lamb_tpu.data.images.records import Record
from lamb_tpu.data.images.source import ImageOptions, ImageSource

Route = Callable[[list[str], int, int, bool], Iterator[Any]]
_FRACTION = 0.875


class NotInstalled(Exception):
    """A package that a route needs is missing."""


class _Files:
    """`Records` of image files, all of class 0."""

    num_classes = 1
    notes: tuple[str, ...] = ()

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, indices: list[int]) -> list[Record]:
        records = []
        for index in indices:
            with open(self._paths[index], "rb") as file:
                records.append(Record(file.read(), 0))
        return records

    def name(self, index: int) -> str:
        return self._paths[index]


class Photos(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The photographs as a TFDS data set that stores their encoded bytes."""

    VERSION = tfds.core.Version("1.0.0")
    name = "photos"
    url_infos: Mapping[str, Any] = {}
    paths: list[str] = []  # noqa: RUF012

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(num_classes=1),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, path in enumerate(self.paths):
            content = io.BytesIO(pathlib.Path(path).read_bytes())
            yield number, {"image": content, "label": 0}


def ours(paths: list[str], pixels: int, batch: int, training: bool) -> Iterator[data.Batch]:
    """Reads files through `ImageSource`."""
    options = ImageOptions(size=pixels, threads=1)
    return _batches(ImageSource("files", _Files(paths), options, training=training), batch)


def ours_prepared(folder: str) -> Route:
    """Reads ArrayRecord files through `ImageSource`; writes them into `folder` on first use."""

    def route(paths: list[str], pixels: int, batch: int, training: bool) -> Iterator[data.Batch]:
        tfds.disable_progress_bar()
        Photos.paths = paths
        Photos(data_dir=folder, file_format="array_record").download_and_prepare()
        source = data.load(
            "tfds:photos",
            "train",
            data_dir=folder,
            training=training,
            options={"size": pixels, "threads": 1},
        )
        return _batches(source, batch)

    return route


def _batches(source: data.Source, batch: int) -> Iterator[data.Batch]:
    # Do not use TrainLoader, whose threads read ahead.
    for start in itertools.count(step=batch):
        indices = data.global_indices(0, start, start + batch, len(source))
        yield source.gather(indices, np.arange(start, start + batch) // len(source))


def torchvision(paths: list[str], pixels: int, batch: int, training: bool) -> Iterator[Any]:
    """Reads with Pillow, torchvision's transforms and a PyTorch DataLoader without worker processes."""
    from PIL import Image

    try:
        torch = importlib.import_module("torch")
        transforms = importlib.import_module("torchvision.transforms.v2")
    except ImportError as error:
        raise NotInstalled(str(error)) from None
    torch.set_num_threads(1)
    if training:
        steps = [transforms.RandomResizedCrop(pixels), transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(round(pixels / _FRACTION)), transforms.CenterCrop(pixels)]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])

    class Files(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            with Image.open(paths[index]) as draw:
                return transform(draw.convert("RGB")), 0

    files = Files()
    # Sample with replacement, so that a small set still gives full batches.
    sampler = torch.utils.data.RandomSampler(files, replacement=True, num_samples=2**31)
    return iter(torch.utils.data.DataLoader(files, batch, sampler=sampler, num_workers=0))


def tf_data(
    paths: list[str], pixels: int, batch: int, training: bool, full_size: bool = False
) -> Iterator[Any]:
    """Reads with tf.data and `decode_and_crop_jpeg`, like the ResNet and EfficientNet code for TPUs.

    With `full_size`, images are decoded in full before they are cropped, for comparison.
    """
    try:
        tf = importlib.import_module("tensorflow")
    except ImportError as error:
        raise NotInstalled(str(error)) from None

    def box(shape: Any) -> Any:
        if training:
            begin, size, _ = tf.image.sample_distorted_bounding_box(
                shape,
                tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
                min_object_covered=0.1,
                aspect_ratio_range=(3 / 4, 4 / 3),
                area_range=(0.08, 1.0),
                max_attempts=10,
                use_image_if_no_bounding_boxes=True,
            )
            return tf.concat([begin[:2], size[:2]], 0)
        side = tf.cast(_FRACTION * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32), tf.int32)
        return tf.stack([(shape[0] - side + 1) // 2, (shape[1] - side + 1) // 2, side, side])

    def decode(path: Any) -> tuple[Any, int]:
        content = tf.io.read_file(path)
        crop = box(tf.image.extract_jpeg_shape(content))
        if full_size:
            image = tf.image.crop_to_bounding_box(
                tf.image.decode_jpeg(content, channels=3), *tf.unstack(crop, 4)
            )
        else:
            image = tf.image.decode_and_crop_jpeg(content, crop, channels=3)
        image = tf.image.resize(image, (pixels, pixels), method="bilinear")
        if training:
            image = tf.image.random_flip_left_right(image)
        return tf.cast(image, tf.uint8), 0

    options = tf.data.Options()
    # Prefetching would run during the turns of other routes. tf.data still prefetches one batch.
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = 1
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).repeat()
    decoded = files.map(decode).batch(batch, drop_remainder=True)
    return iter(decoded.with_options(options))
