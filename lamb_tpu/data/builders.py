"""TFDS builders of MNIST, Fashion-MNIST and CIFAR-10 that need no TensorFlow.

Name, version, features, splits, URLs and checksums are inherited from the builders of TFDS. Only
the original files are read in another way, because TFDS' own code calls TensorFlow. Archives are
read in memory and never extracted, so that MNIST and Fashion-MNIST, whose files have the same
names, cannot be confused. The classes are not registered in TFDS, where the stock builders have
these names.
"""

import gzip
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.image_classification import cifar, mnist


# mypy does not follow TFDS to the class that takes skip_registration.
class Mnist(mnist.MNIST, skip_registration=True):  # type: ignore[call-arg]
    """MNIST, four idx files, two for each split: http://yann.lecun.com/exdb/mnist/."""

    name = "mnist"
    # TFDS looks for checksums beside the file of the class, where this package has none.
    url_infos = mnist.MNIST.url_infos

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        files = _download(self, dl_manager)
        return {
            split: self._generate_examples(
                files[f"{prefix}-images-idx3-ubyte.gz"], files[f"{prefix}-labels-idx1-ubyte.gz"]
            )
            for split, prefix in (("train", "train"), ("test", "t10k"))
        }

    def _generate_examples(self, images: str, labels: str) -> Iterator[tuple[int, dict]]:
        for index, (image, label) in enumerate(zip(read_idx(images), read_idx(labels))):
            yield index, {"image": Image.fromarray(image), "label": int(label)}


class FashionMnist(mnist.FashionMNIST, skip_registration=True):  # type: ignore[call-arg]
    """Fashion-MNIST, files as of MNIST, with articles of clothing: Xiao et al., arXiv:1708.07747."""

    name = "fashion_mnist"
    url_infos = mnist.FashionMNIST.url_infos
    _split_generators = Mnist._split_generators
    _generate_examples = Mnist._generate_examples


class Cifar10(cifar.Cifar10, skip_registration=True):  # type: ignore[call-arg]
    """CIFAR-10, one tar of six binary files: https://www.cs.toronto.edu/~kriz/cifar.html."""

    name = "cifar10"
    url_infos = cifar.Cifar10.url_infos

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        archive = _download(self, dl_manager)["cifar-10-binary.tar.gz"]
        wanted = {
            "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
            "test": ["test_batch.bin"],
        }
        contents = {}
        with tarfile.open(archive, "r:gz") as tar:
            # Names lie below a folder in the archive. Only regular files have content.
            for member in tar:
                if member.isfile() and (opened := tar.extractfile(member)) is not None:
                    contents[member.name.rpartition("/")[2]] = opened.read()
        # TFDS' builder sets the names here too, because only the archive has them.
        self.info.features["label"].names = contents["batches.meta.txt"].decode().split()
        return {
            split: self._generate_examples(split, b"".join(contents[name] for name in names))
            for split, names in wanted.items()
        }

    def _generate_examples(self, split: str, content: bytes) -> Iterator[tuple[int, dict]]:
        # A record is one byte of label and 3,072 of pixels, channel by channel.
        records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        for index, record in enumerate(records):
            image = np.ascontiguousarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0))
            yield (
                index,
                {
                    "id": f"{split}_{index:05d}",
                    "image": Image.fromarray(image),
                    "label": int(record[0]),
                },
            )


def read_idx(path: str) -> np.ndarray:
    """Reads the uint8 array of a gzipped idx file: a big-endian header with sizes, then bytes."""
    with gzip.open(path) as file:
        content = file.read()
    # Byte 2 is the type, of uint8 in these sets; byte 3 is the number of axes, of four bytes each.
    rank = content[3]
    shape = np.frombuffer(content, ">i4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _download(
    builder: tfds.core.DatasetBuilder, dl_manager: tfds.download.DownloadManager
) -> dict[str, str]:
    """Returns original file name -> path, from the folder of original files or the network."""
    return dl_manager.download({info.filename: url for url, info in builder.url_infos.items()})


BUILDERS: dict[str, Callable[..., tfds.core.GeneratorBasedBuilder]] = {
    builder.name: builder for builder in (Mnist, FashionMnist, Cifar10)
}
