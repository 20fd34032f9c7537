"""MNIST, Fashion-MNIST and CIFAR-10 read from their original files, without TFDS.

The examples and their order are the same as in the sets that TFDS prepares, because they are sorted
in the same way: by the MD5 of the split's name and the example's number. A run that reads original
files therefore equals a run that reads a prepared set, but spends no time on preparing the set and
decoding PNGs.
"""

import gzip
import hashlib
import pathlib
import tarfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lamb_tpu.data import decoded
from lamb_tpu.data.hashing import sha256
from lamb_tpu.data.source import ArraySource
from lamb_tpu.data.splits import slices

_MNIST_FILES = tuple(
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
_NUM_CLASSES = 10


class _Set(NamedTuple):
    """Original files with their sha256, and the number of examples of each split."""

    files: Mapping[str, str]
    lengths: Mapping[str, int]


def _mnist(*sums: str) -> _Set:
    return _Set(dict(zip(_MNIST_FILES, sums, strict=True)), {"train": 60_000, "test": 10_000})


SETS = {
    "mnist": _mnist(
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion_mnist": _mnist(
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    "cifar10": _Set(
        {
            "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
        },
        {"train": 50_000, "test": 10_000},
    ),
}


def load(name: str, split: str, folder: str | None) -> ArraySource | None:
    """Loads a split into memory: `image` uint8 and `label` int32, in the order of TFDS.

    Returns None if the set is not in `SETS`, if `folder` is None, or if an original file is missing
    or was changed.
    """
    if name not in SETS or folder is None:
        return None
    known = SETS[name]
    paths = [pathlib.Path(folder) / file for file in known.files]
    ranges = slices(name, split, known.lengths)
    try:
        if any(sha256(path) != known.files[path.name] for path in paths):
            return None
    except (OSError, ValueError):
        return None
    read = _read_cifar10 if name == "cifar10" else _read_mnist
    chosen: dict[str, list[np.ndarray]] = {"image": [], "label": []}
    for part, start, stop in ranges:
        full = decoded.arrays(f"{name}:{part}", paths, lambda: _ordered(*read(paths, part), part))
        for field in chosen:
            chosen[field].append(full[field][start:stop])
    # The arrays of a split with one range are views, so that runs in one process share memory.
    arrays = {
        field: segments[0] if len(segments) == 1 else np.concatenate(segments)
        for field, segments in chosen.items()
    }
    return ArraySource(f"{name}:{split}", arrays, _NUM_CLASSES)


def read_idx(path: str | pathlib.Path) -> np.ndarray:
    """Reads the uint8 array of a gzipped idx file: a big-endian header with sizes, then bytes."""
    with gzip.open(path) as file:
        content = file.read()
    # Byte 2 is the type, always uint8 here. Byte 3 is the number of axes, whose sizes follow in
    # four bytes each.
    rank = content[3]
    shape = np.frombuffer(content, ">i4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_cifar10(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the archive of CIFAR-10's binary files.

    Returns split -> uint8 (n, 3073): one byte for the label, and 3,072 bytes for the pixels, channel
    by channel; and 'names' -> the bytes of the class names, one per line.
    """
    wanted = {
        "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
        "test": ["test_batch.bin"],
        "names": ["batches.meta.txt"],
    }
    contents = {}
    with tarfile.open(path, "r:gz") as tar:
        # The members' names include a folder. Only regular files have content.
        for member in tar:
            if member.isfile() and (opened := tar.extractfile(member)) is not None:
                contents[member.name.rpartition("/")[2]] = opened.read()
    arrays = {
        key: np.frombuffer(b"".join(contents[name] for name in names), np.uint8)
        for key, names in wanted.items()
    }
    return {
        key: array if key == "names" else array.reshape(-1, 1 + 3 * 32 * 32)
        for key, array in arrays.items()
    }


def _read_mnist(paths: Sequence[pathlib.Path], split: str) -> tuple[np.ndarray, np.ndarray]:
    first = 0 if split == "train" else 2  # as in `_MNIST_FILES`
    return read_idx(paths[first])[..., np.newaxis], read_idx(paths[first + 1])


def _read_cifar10(paths: Sequence[pathlib.Path], split: str) -> tuple[np.ndarray, np.ndarray]:
    rows = read_cifar10(paths[0])[split]
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]


def _ordered(images: np.ndarray, labels: np.ndarray, split: str) -> dict[str, np.ndarray]:
    """Sorts the examples into the order in which TFDS stores them."""
    salted = hashlib.md5(split.encode(), usedforsecurity=False)

    def key(number: int) -> bytes:
        numbered = salted.copy()
        numbered.update(str(number).encode())
        return numbered.digest()

    order = np.array(sorted(range(len(labels)), key=key))
    return {"image": images[order], "label": labels[order].astype(np.int32)}
