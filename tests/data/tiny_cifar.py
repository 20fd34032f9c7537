"""A CIFAR-10 archive of 56 random images, for tests of preparation."""

import io
import pathlib
import tarfile

import numpy as np
from tensorflow_datasets.core.download import checksums

from lamb_tpu.data.builders import Cifar10

FILE_NAME = "cifar-10-binary.tar.gz"
CLASS_NAMES = (
    "airplane automobile bird cat deer dog frog horse ship truck"  # as in batches.meta.txt
).split()
NUM_TRAIN, NUM_TEST = 40, 16


def write(folder: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Writes the archive; returns split -> images uint8 (n, 32, 32, 3), labels int (n,)."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_TRAIN + NUM_TEST, 32, 32, 3), np.uint8)
    labels = rng.integers(0, 10, NUM_TRAIN + NUM_TEST).astype(np.uint8)
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    content = np.concatenate([labels[:, None], planes], axis=1)
    files = {f"data_batch_{k + 1}.bin": content[8 * k : 8 * k + 8].tobytes() for k in range(5)}
    files["test_batch.bin"] = content[NUM_TRAIN:].tobytes()
    files["batches.meta.txt"] = ("\n".join(CLASS_NAMES) + "\n\n").encode()
    with tarfile.open(folder / FILE_NAME, "w:gz") as tar:
        # The files of the original archive are not in order either.
        for name in sorted(files, reverse=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    return {
        "train": (images[:NUM_TRAIN], labels[:NUM_TRAIN]),
        "test": (images[NUM_TRAIN:], labels[NUM_TRAIN:]),
    }


def expect(folder: pathlib.Path, url: str | None = None) -> None:
    """Makes the builder expect the archive in `folder` instead of the original one."""
    (original,) = Cifar10.url_infos
    info = checksums.compute_url_info(folder / FILE_NAME)
    Cifar10.url_infos = {url or original: info}
