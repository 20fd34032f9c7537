"""Normal numbers as PyTorch's CPU generator draws them, to repeat recorded runs.

`torch.randn` of 16 numbers or more fills them with uniform ones and transforms each 16 by
Box and Muller; the last 16 are drawn anew where the number is not a multiple of 16.
"""

import math

import numpy as np


class TorchGenerator:
    """A generator after `torch.manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.RandomState(seed)._bit_generator

    def randn(self, *shape: int) -> np.ndarray:
        """Returns what `torch.randn(*shape)` does, up to rounding; at least 16 numbers."""
        size = math.prod(shape)
        if size < 16:
            raise ValueError(f"{size} numbers are drawn in another way")
        values = self._uniform(size)
        for start in range(0, size - 15, 16):
            values[start : start + 16] = _normal(values[start : start + 16])
        if size % 16:
            values[-16:] = _normal(self._uniform(16))
        return values.reshape(shape)

    def _uniform(self, size: int) -> np.ndarray:
        bits = self._bits.random_raw(size) & (2**24 - 1)
        return bits.astype(np.float32) * np.float32(2**-24)


def _normal(uniform: np.ndarray) -> np.ndarray:
    radius = np.sqrt(-2 * np.log(1 - uniform[:8]))
    angle = np.float32(2 * np.pi) * uniform[8:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
