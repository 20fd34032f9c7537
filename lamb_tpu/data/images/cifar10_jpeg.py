"""CIFAR-10 as one file of JPEGs, for machines that cannot download the original archive.

The file `cifar10_jpeg_q75.npz` has three arrays for each SPLIT, `train` (50,000 images) and `test`
(10,000 images), in the original order: `SPLIT_jpeg`, uint8, all JPEG files end to end;
`SPLIT_offsets`, int64 (n + 1,): image i has the bytes `offsets[i]` to `offsets[i + 1] - 1`; and
`SPLIT_labels`, uint8 (n,). The original images are not compressed, so a JPEG quality of 75 costs
some accuracy.
"""

import pathlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lamb_tpu.cluster.host import num_cores
from lamb_tpu.data.images.jpeg import decode_full
from lamb_tpu.data.source import ArraySource, Batch
from lamb_tpu.data.splits import slices
from lamb_tpu.errors import UserError, unreadable

FILE = "cifar10_jpeg_q75.npz"
_SIDE = 32
_CHUNK = 500  # images per task of a thread


def load_cifar10_jpeg(split: str, source_dir: str | None) -> ArraySource:
    """Loads a split, decoded into memory: `image` uint8 (n, 32, 32, 3), `label` int32 (n,).

    Raises a UserError if the file is missing or damaged, or has no such split.
    """
    path = pathlib.Path(source_dir or ".") / FILE
    if source_dir is None or not path.is_file():
        problem = f"does not hold {FILE}"
        raise UserError("config.data.dir", source_dir, problem, "give the folder with this file")
    try:
        with np.load(path) as stored:
            lengths = {name: len(stored[f"{name}_labels"]) for name in ("train", "test")}
            ranges = slices("cifar10_jpeg", split, lengths)
            parts = [_decode(stored, *part) for part in ranges]
    except UserError:
        raise
    # A damaged archive raises many types of errors, such as a MemoryError for a wrong shape.
    except Exception as error:
        remedy = "replace it with the original file"
        raise unreadable(path, error, remedy, "is not the file of CIFAR-10 as JPEGs") from error
    arrays = {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}
    return ArraySource(f"cifar10_jpeg:{split}", arrays, num_classes=10)


def _decode(stored: Mapping[str, np.ndarray], name: str, start: int, stop: int) -> Batch:
    content, offsets, labels = (stored[f"{name}_{key}"] for key in ("jpeg", "offsets", "labels"))
    images = np.empty((stop - start, _SIDE, _SIDE, 3), np.uint8)

    def fill(first: int) -> None:
        for index in range(first, min(first + _CHUNK, stop)):
            encoded = content[offsets[index] : offsets[index + 1]].tobytes()
            images[index - start], _ = decode_full(encoded)

    with ThreadPoolExecutor(num_cores()) as pool:
        # Consuming the results raises a thread's exception.
        list(pool.map(fill, range(start, stop, _CHUNK)))
    return {"image": images, "label": labels[start:stop].astype(np.int32)}
