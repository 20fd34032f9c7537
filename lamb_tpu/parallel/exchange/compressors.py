"""Contractive compressors: short forms C(x) of a vector, with |C(x) - x|^2 <= (1 - d) |x|^2.

A compressor makes a message of a vector and a vector of a message. It also sends: `total` sums the
messages' vectors over devices, and only what the docstring of its class names is sent.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import selection, sparse
from lamb_tpu.parallel.exchange.joined import split


class Compressor(Protocol):
    """A compressor; an implementation is a frozen dataclass, so that it is hashable."""

    def compress(self, x: jax.Array) -> Any:
        """Returns the message of a vector (n,)."""

    def decompress(self, message: Any) -> jax.Array:
        """Returns C(x), (n,)."""

    def total(
        self, messages: Sequence[Any], axes: Sequence[str], num_devices: int
    ) -> list[jax.Array]:
        """Returns the sums over devices of C(x), (n,) for each message."""

    def each(self, messages: Sequence[Any], axes: Sequence[str]) -> list[jax.Array]:
        """Returns C(x) of every device, (devices, n) for each message."""


@dataclasses.dataclass(frozen=True)
class Identity(Compressor):
    """The vector itself, summed in one all-reduce."""

    def compress(self, x: jax.Array) -> jax.Array:
        return x

    def decompress(self, message: jax.Array) -> jax.Array:
        return message

    def total(
        self, messages: Sequence[jax.Array], axes: Sequence[str], num_devices: int
    ) -> list[jax.Array]:
        return list(lax.psum(list(messages), tuple(axes)))

    def each(self, messages: Sequence[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
        return [collectives.gather_rows(message, axes) for message in messages]


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The values of the largest magnitude; of equal ones, the first.

    Sent are 4 bytes for each value and 4 for its index, from every device to every other.

    Attributes:
      ratio: the fraction of a vector's values, in (0, 1]; rounded down, at least one value.
      count: the number of values instead; None: by `ratio`.
    """

    ratio: float = 0.01
    count: int | None = None

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        if self.count is not None and self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")

    def budget(self, size: int) -> int:
        """Number of values sent of a vector of `size`."""
        count = max(1, int(self.ratio * size)) if self.count is None else self.count
        return min(count, size)

    def compress(self, x: jax.Array) -> sparse.Selected:
        if not x.size:
            return sparse.Selected(x, jnp.zeros(0, bool))
        return sparse.Selected(x, selection.largest(jnp.abs(x), self.budget(x.size)))

    def decompress(self, message: sparse.Selected) -> jax.Array:
        return message.dense()

    def total(
        self, messages: Sequence[sparse.Selected], axes: Sequence[str], num_devices: int
    ) -> list[jax.Array]:
        return sparse.total(messages, self._budgets(messages), axes, num_devices)

    def each(self, messages: Sequence[sparse.Selected], axes: Sequence[str]) -> list[jax.Array]:
        return sparse.each(messages, self._budgets(messages), axes)

    def _budgets(self, messages: Sequence[sparse.Selected]) -> list[int]:
        return [self.budget(message.mask.size) for message in messages]


class Signs(NamedTuple):
    """Signs of a vector and their scale, in a form that is not packed yet.

    Attributes:
      positive: (n,), boolean.
      scale: the magnitude of every value.
    """

    positive: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class Sign(Compressor):
    """The signs, times the mean magnitude; the sign of 0 is +1.

    Sent are 1 bit for each value and 4 bytes a vector, from every device to every other. With more
    than 64 devices that is more than a float32 all-reduce sends; `onebit` sends to each device only
    its part.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, arXiv:1901.09847.
    """

    def compress(self, x: jax.Array) -> Signs:
        return Signs(x >= 0, jnp.sum(jnp.abs(x)) / max(x.size, 1))

    def decompress(self, message: Signs) -> jax.Array:
        return jnp.where(message.positive, message.scale, -message.scale)

    def total(
        self, messages: Sequence[Signs], axes: Sequence[str], num_devices: int
    ) -> list[jax.Array]:
        def add(sums: list[jax.Array], row: Any) -> tuple[list[jax.Array], None]:
            # One device after the other, so that no array is `num_devices` times the gradient.
            vectors = self._vectors(messages, *row)
            return [a + b for a, b in zip(sums, vectors, strict=True)], None

        start = [jnp.zeros(m.positive.shape, m.scale.dtype) for m in messages]
        return lax.scan(add, start, self._gathered(messages, axes))[0]

    def each(self, messages: Sequence[Signs], axes: Sequence[str]) -> list[jax.Array]:
        rows = self._gathered(messages, axes)
        return jax.vmap(lambda *row: self._vectors(messages, *row))(*rows)

    def _gathered(
        self, messages: Sequence[Signs], axes: Sequence[str]
    ) -> tuple[jax.Array, jax.Array]:
        """Every device's bits of all vectors, (devices, bytes), and scales, (devices, vectors)."""
        joined = jnp.concatenate([message.positive for message in messages])
        scales = jnp.stack([message.scale for message in messages])
        return (
            collectives.gather_rows(jnp.packbits(joined), axes),
            collectives.gather_rows(scales, axes),
        )

    def _vectors(
        self, messages: Sequence[Signs], packed: jax.Array, scales: jax.Array
    ) -> list[jax.Array]:
        """The vectors of one device, from its bits and scales."""
        sizes = [message.positive.size for message in messages]
        bits = jnp.unpackbits(packed, count=sum(sizes)).astype(bool)
        parts = zip(split(bits, sizes), scales, strict=True)
        return [self.decompress(Signs(part, scale)) for part, scale in parts]


COMPRESSORS = ("topk", "sign", "identity")


def make_compressor(name: str | Compressor, ratio: float) -> Compressor:
    """Returns the compressor of a name; `ratio` is for 'topk'. A compressor is returned as it is.

    Raises:
      ValueError: the name is unknown, or the ratio is out of (0, 1].
    """
    if not isinstance(name, str):
        return name
    if name not in COMPRESSORS:
        raise ValueError(f"compressor must be one of {', '.join(COMPRESSORS)}, not {name!r}")
    if name == "topk":
        return TopK(ratio)
    return Sign() if name == "sign" else Identity()


def check_ratio(name: str, ratio: float) -> None:
    """Raises ValueError where a fraction that is sent is out of (0, 1]."""
    if not 0 < ratio <= 1:
        raise ValueError(f"{name} must be in (0, 1], the fraction of values, not {ratio}")
