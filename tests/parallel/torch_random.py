"""Normally distributed numbers of PyTorch's CPU generator, to repeat recorded runs.

For 16 numbers or more, `torch.randn` draws uniform numbers and transforms each block of 16 by the
Box-Muller method. If the count is not a multiple of 16, the last 16 numbers are drawn again. Fewer
than 16 numbers are drawn in pairs, in float64.
"""

import math

import numpy as np


class TorchGenerator:
    """PyTorch's generator after `torch.manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.RandomState(seed)._bit_generator
        self._second: float | None = None  # the second number of a pair, if it is not used yet

    def randn(self, *shape: int) -> np.ndarray:
        """Returns the result of `torch.randn(*shape)`, up to rounding."""
        size = math.prod(shape)
        if size < 16:
            return np.array([self._single() for _ in range(size)], np.float32).reshape(shape)
        values = self._uniform(size)
        for start in range(0, size - 15, 16):
            values[start : start + 16] = _normal(values[start : start + 16])
        if size % 16:
            values[-16:] = _normal(self._uniform(16))
        return values.reshape(shape)

    def _single(self) -> float:
        if self._second is not None:
            value, self._second = self._second, None
            return value
        turn, square = (
            ((int(high) << 32 | int(low)) & (2**53 - 1)) * 2**-53
            for high, low in self._bits.random_raw(4).reshape(2, 2)
        )
        radius = math.sqrt(-2 * math.log1p(-square))
        self._second = radius * math.sin(2 * math.pi * turn)
        return radius * math.cos(2 * math.pi * turn)

    def _uniform(self, size: int) -> np.ndarray:
        bits = self._bits.random_raw(size) & (2**24 - 1)
        return bits.astype(np.float32) * np.float32(2**-24)


def _normal(uniform: np.ndarray) -> np.ndarray:
    radius = np.sqrt(-2 * np.log(1 - uniform[:8]))
    angle = np.float32(2 * np.pi) * uniform[8:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
