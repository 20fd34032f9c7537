"""The bundled digits data set: 1,797 scans of handwritten digits (files/README.md)."""

import functools
from importlib import resources

import numpy as np

from lamb_tpu.data.source import ArraySource
from lamb_tpu.data.splits import slices

NUM_TRAIN = 1437  # the first scans; the last 360 are the test split


def load_digits(split: str) -> ArraySource:
    """Loads a split: `image` uint8 (n, 8, 8, 1) with values 0 to 16, `label` int32 (n,)."""
    arrays = _arrays()
    num_test = len(arrays["label"]) - NUM_TRAIN
    first = {"train": 0, "test": NUM_TRAIN}
    ranges = slices("digits", split, {"train": NUM_TRAIN, "test": num_test})
    indices = np.concatenate([first[name] + np.arange(start, stop) for name, start, stop in ranges])
    # Indexing by an array copies, so callers cannot change the cached arrays.
    chosen = {field: array[indices] for field, array in arrays.items()}
    return ArraySource(f"digits:{split}", chosen, num_classes=10)


@functools.cache
def _arrays() -> dict[str, np.ndarray]:
    file = resources.files("lamb_tpu.data").joinpath("files", "digits.npz")
    with file.open("rb") as handle, np.load(handle) as stored:
        return {"image": stored["image"], "label": stored["label"]}
