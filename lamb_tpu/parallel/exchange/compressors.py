"""Contractive compressors: approximations C(x) of a vector x, with |C(x) - x|^2 <= (1 - d) |x|^2.

Here d is a constant in (0, 1]. The docstring of each class says how many bytes are sent.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.errors import ArgumentError, listed
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.collectives import split
from lamb_tpu.parallel.exchange import selection, sparse
from lamb_tpu.parallel.exchange.base import check_range, check_ratio
from lamb_tpu.types import PyTree


class Compressor(Protocol):
    """A compressor; an implementation is a frozen dataclass, so that it is hashable."""

    def compress(self, x: jax.Array) -> Any:
        """Returns the message of a vector (n,)."""

    def decompress(self, message: PyTree) -> jax.Array:
        """Returns C(x), (n,)."""

    def total(self, messages: Sequence[Any], axes: Sequence[str]) -> list[jax.Array]:
        """Returns for each message the sum of C(x) over devices, (n,)."""

    def each(self, messages: Sequence[Any], axes: Sequence[str]) -> list[jax.Array]:
        """Returns for each message the C(x) of every device, (devices, n)."""


@dataclasses.dataclass(frozen=True)
class Identity(Compressor):
    """The vector itself, summed in one all-reduce."""

    def compress(self, x: jax.Array) -> jax.Array:
        return x

    def decompress(self, message: jax.Array) -> jax.Array:
        return message

    def total(self, messages: Sequence[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
        return list(lax.psum(list(messages), tuple(axes)))

    def each(self, messages: Sequence[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
        return [collectives.gather_rows(message, axes) for message in messages]


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The values with the largest magnitudes; among equal magnitudes, the first.

    To every other device, a device sends 4 bytes for each value and 4 bytes for its index.

    Attributes:
      ratio: the fraction of a vector's values that is sent, in (0, 1]. The number of values is
        rounded down, but is at least one.
      count: the number of values that are sent, in place of `ratio`; None: use `ratio`.
    """

    ratio: float = 0.01
    count: int | None = None

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_range("count", self.count, self.count is None or self.count >= 1, "at least 1")

    def budget(self, size: int) -> int:
        """Returns the number of values sent for a vector of length `size`."""
        count = max(1, int(self.ratio * size)) if self.count is None else self.count
        return min(count, size)

    def compress(self, x: jax.Array) -> sparse.Selected:
        if not x.size:
            return sparse.Selected(x, jnp.zeros(0, bool))
        return sparse.Selected(x, selection.largest(jnp.abs(x), self.budget(x.size)))

    def decompress(self, message: sparse.Selected) -> jax.Array:
        return message.dense()

    def total(self, messages: Sequence[sparse.Selected], axes: Sequence[str]) -> list[jax.Array]:
        return sparse.total(messages, self._budgets(messages), axes)

    def each(self, messages: Sequence[sparse.Selected], axes: Sequence[str]) -> list[jax.Array]:
        return sparse.each(messages, self._budgets(messages), axes)

    def _budgets(self, messages: Sequence[sparse.Selected]) -> list[int]:
        return [self.budget(message.mask.size) for message in messages]


class Signs(NamedTuple):
    """Signs of a vector and their scale, before packing."""

    positive: jax.Array  # (n,), boolean
    scale: jax.Array  # the magnitude of every value


@dataclasses.dataclass(frozen=True)
class Sign(Compressor):
    """The signs of the values, times their mean magnitude; the sign of 0 is +1.

    To every other device, a device sends 1 bit for each value and 4 bytes for each vector. With more
    than 64 devices this exceeds the bytes of a float32 all-reduce. The exchange `onebit` avoids
    this: it sends each device only one chunk.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, arXiv:1901.09847.
    """

    def compress(self, x: jax.Array) -> Signs:
        return Signs(x >= 0, jnp.sum(jnp.abs(x)) / max(x.size, 1))

    def decompress(self, message: Signs) -> jax.Array:
        return jnp.where(message.positive, message.scale, -message.scale)

    def total(self, messages: Sequence[Signs], axes: Sequence[str]) -> list[jax.Array]:
        def add(sums: list[jax.Array], row: Any) -> tuple[list[jax.Array], None]:
            # Add one device after the other, so that the vectors of all devices never exist at once.
            return [*map(jnp.add, sums, self._vectors(messages, *row))], None

        start = [jnp.zeros(m.positive.shape, m.scale.dtype) for m in messages]
        return lax.scan(add, start, self._gathered(messages, axes))[0]

    def each(self, messages: Sequence[Signs], axes: Sequence[str]) -> list[jax.Array]:
        rows = self._gathered(messages, axes)
        return jax.vmap(lambda *row: self._vectors(messages, *row))(*rows)

    def _gathered(
        self, messages: Sequence[Signs], axes: Sequence[str]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns every device's packed signs, (devices, bytes), and scales, (devices, vectors)."""
        joined = jnp.concatenate([message.positive for message in messages])
        scales = jnp.stack([message.scale for message in messages])
        return (
            collectives.gather_rows(jnp.packbits(joined), axes),
            collectives.gather_rows(scales, axes),
        )

    def _vectors(
        self, messages: Sequence[Signs], packed: jax.Array, scales: jax.Array
    ) -> list[jax.Array]:
        """Returns the vectors of one device, from its packed signs and scales."""
        sizes = [message.positive.size for message in messages]
        bits = jnp.unpackbits(packed, count=sum(sizes)).astype(bool)
        parts = zip(split(bits, sizes), scales, strict=True)
        return [self.decompress(Signs(part, scale)) for part, scale in parts]


def make_compressor(name: str | Compressor, ratio: float) -> Compressor:
    """Returns the compressor `name`; a `Compressor` is returned unchanged. `ratio` is for 'topk'."""
    if not isinstance(name, str):
        return name
    made = {"topk": lambda: TopK(ratio), "sign": Sign, "identity": Identity}
    if name not in made:
        raise ArgumentError("compressor", name, "is unknown", f"use {listed(made)}")
    return made[name]()
