"""TFDS builders of MNIST, Fashion-MNIST and CIFAR-10 that need no TensorFlow.

Name, version, features, splits, URLs and checksums are inherited from the builders of TFDS. Only
the code that reads the original files is replaced, because TFDS's code calls TensorFlow. Archives
are read in memory and never extracted to files, because the files of MNIST and of Fashion-MNIST
have the same names. The classes are not registered with TFDS, because TFDS's builders already have
these names.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.image_classification import cifar, mnist

from lamb_tpu.data.originals import read_cifar10, read_idx


# mypy does not see that the base class accepts skip_registration.
class Mnist(mnist.MNIST, skip_registration=True):  # type: ignore[call-arg]
    """MNIST, two idx files for each split: http://yann.lecun.com/exdb/mnist/."""

    name = "mnist"
    # TFDS looks for a checksum file next to the class's module; this package has no such file.
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
    """Fashion-MNIST, articles of clothing in MNIST's format: Xiao et al., arXiv:1708.07747."""

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
        contents = read_cifar10(archive)
        # As in TFDS, the class names are set here, because only the archive has them.
        self.info.features["label"].names = contents["names"].tobytes().decode().split()
        return {name: self._generate_examples(name, contents[name]) for name in ("train", "test")}

    def _generate_examples(self, split: str, rows: np.ndarray) -> Iterator[tuple[int, dict]]:
        for index, row in enumerate(rows):
            image = np.ascontiguousarray(row[1:].reshape(3, 32, 32).transpose(1, 2, 0))
            number, label = f"{split}_{index:05d}", int(row[0])
            yield index, {"id": number, "image": Image.fromarray(image), "label": label}


def _download(
    builder: tfds.core.DatasetBuilder, dl_manager: tfds.download.DownloadManager
) -> dict[str, str]:
    """Returns original file name -> path of the downloaded file or of the user's original file."""
    return dl_manager.download({info.filename: url for url, info in builder.url_infos.items()})


BUILDERS: dict[str, Callable[..., tfds.core.GeneratorBasedBuilder]] = {
    builder.name: builder for builder in (Mnist, FashionMnist, Cifar10)
}
