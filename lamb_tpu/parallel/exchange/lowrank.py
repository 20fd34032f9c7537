"""Matrices of a gradient, and their approximation by two thin factors that devices sum.

With M the sum of the devices' matrices, a step of the power iteration is P = M Q, orthonormal
columns in place of P's, and Q = M^T P; P Q^T then approximates M. Both products are linear in M, so
each device multiplies its own matrix and only the factors are summed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.optim import parameters

# A column that is closer to the span of those before it, relative to its norm, is only rounding.
_DEPENDENT = 1e-6
_PRECISE = lax.Precision.HIGHEST


class Matrix(NamedTuple):
    """A leaf of the gradient that is seen as `layers` matrices of (rows, columns).

    Attributes:
      number: the leaf's place among all leaves.
      path: the leaf's path, joined by '/'.
      layers, rows, columns: the shape of the stack of matrices.
    """

    number: int
    path: str
    layers: int
    rows: int
    columns: int


def find(params: Any, stacked: Sequence[str], worth: Callable[[int, int], bool]) -> list[Matrix]:
    """Returns the leaves that are sent as factors.

    A leaf's axes are cut into leading and trailing ones where rows + columns is least, the later
    place of two that are alike: (in, out) for a dense layer, (height * width * in, out) for a
    convolution, (width, heads * size) for attention. PyTorch's kernels have `out` first, and the
    references' matrices are therefore the transposes of these.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      stacked: regular expressions over paths of leaves whose first axis stacks layers.
      worth: whether matrices of (rows, columns) are sent as factors; leaves with fewer than two
        axes besides that of layers never are.
    """
    found = []
    leaves = zip(parameters.leaf_paths(params), jax.tree.leaves(params), strict=True)
    for index, (path, leaf) in enumerate(leaves):
        layers, sides = 1, leaf.shape
        if any(parameters.matches(pattern, path) for pattern in stacked):
            layers, sides = leaf.shape[0], leaf.shape[1:]
        if len(sides) < 2 or not leaf.size:
            continue
        cuts = [(math.prod(sides[:i]), math.prod(sides[i:])) for i in range(len(sides) - 1, 0, -1)]
        rows, columns = min(cuts, key=sum)
        if worth(rows, columns):
            found.append(Matrix(index, path, layers, rows, columns))
    return found


def to_matrices(leaf: jax.Array, matrix: Matrix) -> jax.Array:
    """Returns a leaf as float32 of (layers, rows, columns)."""
    return leaf.reshape(matrix[-3:]).astype(jnp.float32)


def add_up(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Sums arrays over mesh axes in float32 and in one collective."""
    if not arrays:
        return []
    flat = jnp.concatenate([array.astype(jnp.float32).ravel() for array in arrays])
    # A float32 on the wire also where the compiler would send a narrower dtype that it came from.
    parts = jnp.split(lax.psum(flat, axes), np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def times(matrices: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns M F of stacks (layers, rows, columns) and (layers, columns, rank)."""
    return jnp.einsum("lnm,lmr->lnr", matrices, factor, precision=_PRECISE)


def transposed_times(matrices: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns M^T F of stacks (layers, rows, columns) and (layers, rows, rank)."""
    return jnp.einsum("lnm,lnr->lmr", matrices, factor, precision=_PRECISE)


def outer(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns P Q^T of stacks (layers, rows, rank) and (layers, columns, rank)."""
    return jnp.einsum("lnr,lmr->lnm", left, right, precision=_PRECISE)


def orthonormalise(factors: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns orthonormal columns that span those of each factor, one column after the other.

    Factors of one shape are treated together. A column in the span of those before it, such as a
    column of zeros, becomes 0.

    Args:
      factors: stacks of matrices, (layers, rows, rank).
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, factor in enumerate(factors):
        groups.setdefault(factor.shape[1:], []).append(index)
    found: dict[int, jax.Array] = {}
    for indices in groups.values():
        columns = _orthonormal(jnp.concatenate([factors[i] for i in indices]))
        ends = np.cumsum([len(factors[i]) for i in indices])[:-1]
        found.update(zip(indices, jnp.split(columns, ends), strict=True))
    return [found[index] for index in range(len(factors))]


def _orthonormal(factor: jax.Array) -> jax.Array:
    """Gram-Schmidt of (layers, rows, rank), with each projection taken out twice.

    Once would leave columns that are nearly dependent far from orthogonal in float32.
    """
    # Squares of a small gradient would underflow.
    largest = jnp.max(jnp.abs(factor), axis=(1, 2), keepdims=True)
    factor = factor / jnp.where(largest > 0, largest, 1)

    # A loop, as programs of many ranks and shapes would take long to compile.
    def add(index: jax.Array, basis: jax.Array) -> jax.Array:
        column = lax.dynamic_slice_in_dim(factor, index, 1, axis=2)
        before = jnp.linalg.norm(column, axis=1, keepdims=True)
        for _ in range(2):
            column = column - times(basis, transposed_times(basis, column))
        norm = jnp.linalg.norm(column, axis=1, keepdims=True)
        kept = norm > _DEPENDENT * before
        column = jnp.where(kept, column / jnp.where(kept, norm, 1), 0)
        return lax.dynamic_update_slice_in_dim(basis, column, index, axis=2)

    return lax.fori_loop(0, factor.shape[2], add, jnp.zeros_like(factor))


def random_factors(
    matrices: Sequence[Matrix],
    sides: Sequence[int],
    ranks: Sequence[int],
    seed: int,
    count: jax.Array | int,
) -> list[jax.Array]:
    """Returns normal numbers (layers, side, rank) for each matrix, the same on every device.

    Args:
      matrices: the leaves.
      sides: number of rows of each factor.
      ranks: number of columns of each factor.
      seed: seed of all draws.
      count: number of this draw.
    """
    # By name, so that the draws are the same where jax is configured for another generator.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)
    return [
        jax.random.normal(
            jax.random.fold_in(key, matrix.number), (matrix.layers, side, rank), jnp.float32
        )
        for matrix, side, rank in zip(matrices, sides, ranks, strict=True)
    ]
