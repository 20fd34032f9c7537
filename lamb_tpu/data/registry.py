"""Sets by name: the embedded one, those we prepare ourselves, and any prepared TFDS set."""

import functools
import os
from collections.abc import Callable

import tensorflow_datasets as tfds

from lamb_tpu.data.builders import BUILDERS
from lamb_tpu.data.digits import load_digits
from lamb_tpu.data.prepare import is_prepared, prepare
from lamb_tpu.data.source import RecordSource, Source
from lamb_tpu.data.splits import slices
from lamb_tpu.errors import UserError

IN_MEMORY_BYTES = 2**30  # decoded sets up to this size are read into memory by default
_TFDS_PREFIX = "tfds:"


def load(
    name: str,
    split: str,
    *,
    data_dir: str | None = None,
    source_dir: str | None = None,
    in_memory: bool | None = None,
) -> Source:
    """A split of a data set, prepared first if need be.

    Args:
      name: `digits` (embedded), `mnist`, `fashion_mnist`, `cifar10`, or `tfds:NAME[/CONFIG]` for
        any set prepared by TFDS in the ArrayRecord format.
      split: in TFDS syntax, such as `train`, `train[:1000]` or `test[50%:]`.
      data_dir: folder of prepared sets; None is TFDS's own, `~/tensorflow_datasets`.
      source_dir: folder with the original files to prepare from, where the set is not prepared
        yet; None downloads them.
      in_memory: whether to read the whole split once into arrays; None does so up to
        `IN_MEMORY_BYTES`. `digits` always lies in memory.

    Returns:
      Fields in the source's own dtypes (images uint8), class labels int32.

    Raises:
      UserError: unknown name or split, missing or damaged files, no network.
    """
    data_dir, source_dir = (
        None if folder is None else os.path.expanduser(folder) for folder in (data_dir, source_dir)
    )
    if name.startswith(_TFDS_PREFIX):
        return _load_tfds(name, split, data_dir, source_dir, in_memory)
    if name not in DATASETS:
        raise UserError(
            f"config.data.name is {name!r}, an unknown data set; known are "
            f"{', '.join(sorted(DATASETS))}, and tfds:NAME[/CONFIG] for one prepared by TFDS"
        )
    return DATASETS[name](split, data_dir, source_dir, in_memory)


def _load_own(
    name: str, split: str, data_dir: str | None, source_dir: str | None, in_memory: bool | None
) -> Source:
    prepare(BUILDERS[name](data_dir=data_dir), source_dir)
    # A new builder, because one made before another process had finished knows of no splits.
    return _read(name, BUILDERS[name](data_dir=data_dir), split, in_memory)


def _load_tfds(
    name: str, split: str, data_dir: str | None, source_dir: str | None, in_memory: bool | None
) -> Source:
    tfds_name = name.removeprefix(_TFDS_PREFIX)
    if source_dir is not None:
        raise UserError(
            f"data set {name} cannot be prepared from a folder of original files, found "
            f"{source_dir}; prepare it with TFDS and leave the folder out"
        )
    try:
        builder = tfds.builder(tfds_name, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"data set {name}: TFDS has no {tfds_name!r} ({first_line})") from error
    if not is_prepared(builder):
        raise UserError(
            f"data set {name} is not prepared in {builder.data_dir}; prepare it once with "
            f"tfds.builder({tfds_name!r}, data_dir=..., file_format='array_record')"
            ".download_and_prepare(), on a machine with TensorFlow where the set needs it"
        )
    return _read(name, builder, split, in_memory)


def _read(
    name: str, builder: tfds.core.DatasetBuilder, split: str, in_memory: bool | None
) -> Source:
    infos = builder.info.splits
    parts = slices(name, split, {key: info.num_examples for key, info in infos.items()})
    for path in [path for part, *_ in parts for path in infos[part].filepaths]:
        if not path.exists():
            raise UserError(
                f"data set {name}: {path} is missing; delete {builder.data_dir} and prepare the "
                "set again"
            )
    try:
        records = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise UserError(
            f"data set {name}: {builder.data_dir} is prepared as {builder.info.file_format}, which "
            "cannot be read by index; prepare it in another data folder as array_record"
        ) from error
    features = builder.info.features
    labels = [key for key in features if isinstance(features[key], tfds.features.ClassLabel)]
    num_classes = features["label"].num_classes if "label" in labels else None
    folder = str(builder.data_dir)
    source = RecordSource(f"{name}:{split}", records, num_classes, labels, folder)
    if in_memory is None:
        example_bytes = sum(spec.num_bytes for spec in source.element_spec.values())
        in_memory = len(source) * example_bytes <= IN_MEMORY_BYTES
    return source.read_all() if in_memory else source


def _embedded(
    split: str, data_dir: str | None, source_dir: str | None, in_memory: bool | None
) -> Source:
    return load_digits(split)


DATASETS: dict[str, Callable[[str, str | None, str | None, bool | None], Source]] = {
    "digits": _embedded,
    **{name: functools.partial(_load_own, name) for name in BUILDERS},
}
