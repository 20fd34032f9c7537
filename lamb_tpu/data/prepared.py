"""Sets that TFDS has prepared as ArrayRecord files, read by index or into memory.

The registry imports this module only when it is needed, because importing TFDS takes a third of a
second.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow_datasets as tfds

from lamb_tpu.data import decoded
from lamb_tpu.data.builders import BUILDERS
from lamb_tpu.data.prepare import is_prepared, prepare
from lamb_tpu.data.source import ArraySource, RecordSource, Source, num_bytes
from lamb_tpu.data.splits import slices
from lamb_tpu.errors import UserError

if TYPE_CHECKING:
    from lamb_tpu.data.images.source import ImageOptions

IN_MEMORY_BYTES = 2**30  # decoded sets up to this size are read into memory by default
PREFIX = "tfds:"


def load_by_builder(
    name: str, split: str, data_dir: str | None, source_dir: str | None, in_memory: bool | None
) -> Source:
    """Loads a split of a set in `BUILDERS`, see `registry.load`; prepares the set if necessary."""
    builder = functools.partial(BUILDERS[name], data_dir=data_dir)
    prepare(builder(), source_dir)
    # Makes a new builder: the first has no splits if another process has just prepared the set.
    return read(name, builder(), split, in_memory)


def find(name: str, data_dir: str | None, source_dir: str | None) -> tfds.core.DatasetBuilder:
    """Returns the builder of `tfds:NAME[/CONFIG]`; raises a UserError if the set is not prepared."""
    tfds_name = name.removeprefix(PREFIX)
    if source_dir is not None:
        problem = f"holds original files, from which data set {name} cannot be prepared"
        remedy = "leave it out and prepare the set with TFDS"
        raise UserError("config.data.dir", source_dir, problem, remedy)
    try:
        builder = tfds.builder(tfds_name, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        problem = f"is unknown to TFDS ({first_line})"
        raise UserError(
            f"data set {name}", ..., problem, "use the name of a TFDS data set"
        ) from error
    if not is_prepared(builder):
        raise UserError(
            f"data set {name}",
            problem=f"is not prepared in {builder.data_dir}",
            remedy=f"prepare it once with tfds.builder({tfds_name!r}, data_dir=..., "
            "file_format='array_record').download_and_prepare(), on a machine with TensorFlow if needed",
        )
    return builder


def holds_photographs(builder: tfds.core.DatasetBuilder) -> bool:
    """Returns whether the images of a set differ in size and so must be cropped."""
    features = builder.info.features
    image = features["image"] if "image" in features else None
    # The shape has None for a side that differs between examples.
    return isinstance(image, tfds.features.Image) and None in image.shape[:2]


def read(
    name: str, builder: tfds.core.DatasetBuilder, split: str, in_memory: bool | None
) -> Source:
    """Returns a split of a prepared set; see `registry.load` for `in_memory`."""
    records, paths = _open(name, builder, split)
    features = builder.info.features
    labels = [key for key in features if isinstance(features[key], tfds.features.ClassLabel)]
    folder = str(builder.data_dir)
    source = RecordSource(
        name=f"{name}:{split}",
        records=records,
        num_classes=features["label"].num_classes if "label" in labels else None,
        label_fields=labels,
        folder=folder,
    )
    if in_memory is None:
        # Compares the decoded size, which may be many times the size of the files.
        in_memory = num_bytes(source) <= IN_MEMORY_BYTES
    if not in_memory:
        return source
    if "://" in folder:  # objects in a bucket have no cheap modification time
        return source.read_all()
    arrays = decoded.arrays(source.name, paths, lambda: source.read_all().arrays)
    return ArraySource(source.name, arrays, source.num_classes)


def load_images(
    name: str,
    split: str,
    builder: tfds.core.DatasetBuilder,
    options: "ImageOptions",
    seed: int,
    training: bool,
) -> Source:
    """Returns a split of a prepared set of photographs, which are decoded when they are read."""
    from lamb_tpu.data.images.records import TfdsRecords
    from lamb_tpu.data.images.source import ImageSource

    if options.holdout:
        problem = f"is an option of image_folder, not of data set {name}"
        remedy = "use splits such as 'train[:90%]' and 'train[90%:]'"
        raise UserError("config.data.options.holdout", options.holdout, problem, remedy)
    features = builder.info.features
    label = features["label"] if "label" in features else None
    if not isinstance(label, tfds.features.ClassLabel):
        problem = "has no class label named 'label'"
        raise UserError(f"data set {name}", ..., problem, "use another set")
    num_classes = options.num_classes or label.num_classes
    if num_classes < label.num_classes:
        problem = f"is less than the {label.num_classes} classes of data set {name}"
        remedy = f"use 0 or at least {label.num_classes}"
        raise UserError("config.data.options.num_classes", num_classes, problem, remedy)
    # Images stay encoded: `ImageSource` decodes only what its crop needs.
    source, _ = _open(name, builder, split, {"image": tfds.decode.SkipDecoding()})
    records = TfdsRecords(source, num_classes, str(builder.data_dir))
    return ImageSource(f"{name}:{split}", records, options, seed=seed, training=training)


def _open(
    name: str,
    builder: tfds.core.DatasetBuilder,
    split: str,
    decoders: Mapping[str, Any] | None = None,
) -> tuple[Any, list[pathlib.Path]]:
    """Opens a prepared set for reading by index; returns its records and the paths of its files."""
    # The files are checked before TFDS opens them, so that the error names the missing file.
    infos = builder.info.splits
    ranges = slices(name, split, {key: info.num_examples for key, info in infos.items()})
    paths = [path for each, *_ in ranges for path in infos[each].filepaths]
    for path in paths:
        if not path.exists():
            remedy = f"delete {builder.data_dir} and prepare the set again"
            raise UserError(f"{path} of data set {name}", ..., "is missing", remedy)
    try:
        return builder.as_data_source(split=split, decoders=decoders), paths
    except NotImplementedError as error:
        problem = f"is prepared as {builder.info.file_format.value}, which cannot be read by index"
        remedy = "prepare it as array_record in another data folder"
        raise UserError(f"{builder.data_dir} of data set {name}", ..., problem, remedy) from error
