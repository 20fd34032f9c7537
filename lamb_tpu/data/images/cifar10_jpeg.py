"""CIFAR-10 as one file of JPEGs, for machines that cannot download the original archive.

The file, `cifar10_jpeg_q75.npz`, has for each of `train` (50,000) and `test` (10,000), in the
original order: `_jpeg`, uint8, all JPEG files end to end; `_offsets`, int64 (n + 1,), with picture
i in the bytes from [i] to [i + 1]; `_labels`, uint8 (n,). The originals are not compressed; JPEG of
quality 75 costs some accuracy.
"""

import pathlib
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lamb_tpu.cluster.host import num_cores
from lamb_tpu.data.images.jpeg import BadImage, decode_whole
from lamb_tpu.data.source import ArraySource
from lamb_tpu.data.splits import slices
from lamb_tpu.errors import UserError

FILE = "cifar10_jpeg_q75.npz"
_SIDE = 32
_CHUNK = 500  # pictures that a thread takes at a time


def load_cifar10_jpeg(split: str, folder: str | None) -> ArraySource:
    """Loads a split, decoded into memory: `image` uint8 (n, 32, 32, 3), `label` int32 (n,).

    Args:
      split: TFDS split syntax over `train` and `test`.
      folder: folder of the file.

    Raises:
      UserError: the split or the file is not as described.
    """
    path = pathlib.Path(folder or ".") / FILE
    if folder is None or not path.is_file():
        raise UserError(
            f"config.data.dir is {folder}; for cifar10_jpeg it must be the folder that holds {FILE}"
        )
    try:
        with np.load(path) as stored:
            lengths = {name: len(stored[f"{name}_labels"]) for name in ("train", "test")}
            parts = slices("cifar10_jpeg", split, lengths)
            images, labels = zip(
                *(
                    _decode(
                        stored[f"{name}_jpeg"],
                        stored[f"{name}_offsets"],
                        stored[f"{name}_labels"],
                        start,
                        stop,
                    )
                    for name, start, stop in parts
                )
            )
    except (KeyError, ValueError, OSError, zipfile.BadZipFile, BadImage) as error:
        raise UserError(f"{path} is not the file of CIFAR-10 as JPEGs: {error}") from error
    arrays = {"image": np.concatenate(images), "label": np.concatenate(labels)}
    return ArraySource(f"cifar10_jpeg:{split}", arrays, num_classes=10)


def _decode(
    content: np.ndarray, offsets: np.ndarray, labels: np.ndarray, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    images = np.empty((stop - start, _SIDE, _SIDE, 3), np.uint8)

    def fill(first: int) -> None:
        for index in range(first, min(first + _CHUNK, stop)):
            encoded = content[offsets[index] : offsets[index + 1]].tobytes()
            images[index - start], _ = decode_whole(encoded)

    with ThreadPoolExecutor(num_cores()) as pool:
        # Taking the results raises what a thread has raised.
        list(pool.map(fill, range(start, stop, _CHUNK)))
    return images, labels[start:stop].astype(np.int32)
