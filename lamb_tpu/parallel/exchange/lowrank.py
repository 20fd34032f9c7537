"""Matrices of a gradient, and their approximation by two thin factors that devices sum.

Let M be the sum of the devices' matrices. A step of the power iteration computes P = M Q, makes the
columns of P orthonormal, and computes Q = M^T P. Then P Q^T approximates M. Both products are
linear in M, so each device multiplies its matrix and only the factors are summed.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.optim import parameters
from lamb_tpu.types import Params

# If a column's distance from the span of earlier columns is below this fraction of the column's
# norm, the distance is only rounding error.
_DEPENDENT = 1e-6
_PRECISE = lax.Precision.HIGHEST


class Matrix(NamedTuple):
    """A leaf of the gradient as `layers` matrices of (rows, columns)."""

    number: int  # index among all leaves
    path: str
    layers: int
    rows: int
    columns: int


def find(params: Params, stacked: Sequence[str], worth: Callable[[int, int], bool]) -> list[Matrix]:
    """Returns the leaves that are sent as factors.

    The leading axes of a leaf form the rows and the trailing axes the columns. The cut between them
    is where rows + columns is least, or the later of two such cuts: (in, out) for a dense layer,
    (height * width * in, out) for a convolution, (width, heads * size) for attention. PyTorch's
    kernels have `out` first, so the matrices of the references are transposed.

    Leaves with fewer than two axes, not counting the axis of layers, are never sent as factors.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      stacked: regular expressions over paths of leaves; the first axis of these stacks layers.
      worth: returns whether matrices of (rows, columns) are sent as factors.
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


def add_up(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Sums arrays over mesh axes in float32 and in one collective."""
    if not arrays:
        return []
    flat = jnp.concatenate([array.astype(jnp.float32).ravel() for array in arrays])
    # Sum one concatenated float32 array. Otherwise the compiler might send arrays in their narrower
    # dtype and cast them afterwards.
    parts = jnp.split(lax.psum(flat, axes), np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def times(matrices: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns the products M F for stacks M, (layers, rows, columns), and F, (layers, columns, rank)."""
    return jnp.einsum("lnm,lmr->lnr", matrices, factor, precision=_PRECISE)


def transposed_times(matrices: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns the products M^T F for stacks M, (layers, rows, columns), and F, (layers, rows, rank)."""
    return jnp.einsum("lnm,lnr->lmr", matrices, factor, precision=_PRECISE)


def outer(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the products P Q^T for stacks P, (layers, rows, rank), and Q, (layers, columns, rank)."""
    return jnp.einsum("lnr,lmr->lnm", left, right, precision=_PRECISE)


def orthonormalise(factors: Sequence[jax.Array]) -> list[jax.Array]:
    """Orthonormalises the columns of each factor, one column after the other.

    Factors are stacks (layers, rows, rank); factors with the same rows and rank are processed
    together. A column in the span of earlier columns, such as a column of zeros, becomes 0.
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
    """Applies Gram-Schmidt to (layers, rows, rank), and subtracts each projection twice.

    With one subtraction, nearly dependent columns would be far from orthogonal in float32.
    """
    # Scale the factor, because squares of a small gradient would underflow.
    largest = jnp.max(jnp.abs(factor), axis=(1, 2), keepdims=True)
    factor = factor / jnp.where(largest > 0, largest, 1)

    # Use a loop, because unrolled code for many ranks and shapes would take long to compile.
    def add(index: jax.Array, basis: jax.Array) -> jax.Array:
        column = lax.dynamic_slice_in_dim(factor, index, 1, axis=2)
        before = jnp.linalg.norm(column, axis=1, keepdims=True)
        for _ in range(2):
            column = column - times(basis, transposed_times(basis, column))
        norm = jnp.linalg.norm(column, axis=1, keepdims=True)
        is_independent = norm > _DEPENDENT * before
        column = jnp.where(is_independent, column / jnp.where(is_independent, norm, 1), 0)
        return lax.dynamic_update_slice_in_dim(basis, column, index, axis=2)

    return lax.fori_loop(0, factor.shape[2], add, jnp.zeros_like(factor))


def random_factors(
    matrices: Sequence[Matrix], rank: int, seed: int, count: jax.Array | int, side: str = "columns"
) -> list[jax.Array]:
    """Returns normally distributed numbers for each matrix, the same on every device.

    The shape is (layers, rows, rank) or (layers, columns, rank), depending on `side`. The rank is at
    most the smaller side of the matrix. Numbers with another `seed` or `count` are different.
    """
    # Name the random generator, so that the numbers do not depend on the configuration of JAX.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)

    def draw(m: Matrix) -> jax.Array:
        shape = (m.layers, getattr(m, side), min(rank, m.rows, m.columns))
        return jax.random.normal(jax.random.fold_in(key, m.number), shape, jnp.float32)

    return [draw(m) for m in matrices]
