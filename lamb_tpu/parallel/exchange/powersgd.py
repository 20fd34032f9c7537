"""PowerSGD: gradients sent as two thin factors, with error feedback.

Reference: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", https://arxiv.org/abs/1905.13727.
"""

import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lamb_tpu.optim import parameters
from lamb_tpu.parallel.exchange import lowrank
from lamb_tpu.parallel.exchange.base import Exchange, Residual, zeros
from lamb_tpu.parallel.exchange.lowrank import Matrix


@dataclasses.dataclass(frozen=True)
class PowerSGD(Exchange):
    """Sends each matrix M of (rows, columns) as P, (rows, rank), and Q, (columns, rank).

    With M a device's gradient and its error from the update before: P = M Q is summed over devices
    and made orthonormal, Q = M^T P is summed, and P Q^T is the result. The device keeps the error
    M - P (M^T P)^T of its own matrix. (Most codes keep M less the devices' mean of the result. The
    sum over devices, on which alone the results depend, is the same; but that form also adds up how
    a device's gradients differ from the mean, and grows without bound.)

    An update has two collectives of float32, one of all P and of the leaves that are sent whole,
    and one of all Q. Leaves with one axis are sent whole, and so are matrices for which factors
    would not save enough: in particular those with a side not above the rank.

    A column of Q that became 0, because the gradient was, starts afresh from random numbers.

    Attributes:
      axes: mesh axes to sum over.
      num_devices: the product of their sizes.
      rank: number of columns of the factors.
      start: number of first updates in which everything is sent whole.
      min_saving: a matrix is sent as factors if it has more than this times their values.
      iterations: number of power iterations in an update.
      warm_start: begin with the Q of the update before; otherwise with random numbers.
      error_feedback: add what was not sent to the next gradient.
      alternate: compute and send only one factor in an iteration, Q from P and P from Q in turn,
        as the authors' package does. Each iteration approximates what the one before left.
      seed: seed of the random numbers.
      stacked: regular expressions over the paths of leaves whose first axis stacks layers, as a
        scan over layers does; each layer is a matrix then. A run takes those of its model, if it is
        left out.
      compressing, turn: the stage, see `at`.
    """

    axes: tuple[str, ...]
    num_devices: int
    rank: int = 4
    start: int = 0
    min_saving: float = 2.0
    iterations: int = 1
    warm_start: bool = True
    error_feedback: bool = True
    alternate: bool = False
    seed: int = 0
    stacked: tuple[str, ...] = ()
    compressing: bool = dataclasses.field(default=True, init=False)
    turn: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        check_counts(self, {"rank": 1, "start": 0, "iterations": 1})
        check_stacked(self.stacked)
        if not self.min_saving >= 0:
            raise ValueError(f"min_saving is {self.min_saving}, but it must not be negative")
        if self.alternate and not self.warm_start:
            raise ValueError(
                "alternate is True, which computes a factor from that of the iteration before, and "
                "needs warm_start=True"
            )

    def init(self, params: Any) -> Residual:
        """Returns zero errors, and random Q; with `alternate` random P too.

        Raises ValueError if no leaf would be sent as factors.
        """
        check_matrices(self, params)
        matrices = self.matrices(params)
        errors: Any = ()
        if self.error_feedback:
            leaves = jax.tree.leaves(params)
            errors = {m.path: jnp.zeros(leaves[m.number].shape, jnp.float32) for m in matrices}
        whole = {"count": jnp.zeros((), jnp.int32), "q": named(matrices, self._draw(matrices, 0))}
        if self.alternate:
            ranks = [self._rank(m) for m in matrices]
            rows = [m.rows for m in matrices]
            # Other numbers than Q's, which a square matrix would share.
            drawn = lowrank.random_factors(matrices, rows, ranks, self.seed + 1, 0)
            whole["p"] = named(matrices, drawn)
        return Residual(device=errors, whole=whole)

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        leaves, treedef = jax.tree.flatten(grads)
        if not self.compressing:
            return treedef.unflatten(lowrank.add_up(leaves, self.axes)), residual
        matrices = self.matrices(grads)
        own = with_errors(leaves, matrices, residual.device)
        rest = whole_leaves(leaves, matrices)
        sums = self._alternating if self.alternate else self._pairs
        found, left, whole, rest = sums(matrices, own, residual.whole, rest)
        errors = residual.device
        if self.error_feedback:
            errors = {
                m.path: value.reshape(leaves[m.number].shape)
                for m, value in zip(matrices, left, strict=True)
            }
        reduced = merged(leaves, matrices, found, rest)
        return treedef.unflatten(reduced), Residual(errors, (), whole)

    def reset(self, residual: Residual) -> Residual:
        """Returns zero errors, and the same factors: of factors of 0 all sums would be 0."""
        return residual._replace(device=zeros(residual.device))

    def at(self, update: int) -> "PowerSGD":
        """Returns the exchange of an update: not compressing, compressing, or one of two turns."""
        if update < self.start:
            return staged(self, compressing=False, turn=0)
        done = (update - self.start) * self.iterations
        return staged(self, compressing=True, turn=done % 2 if self.alternate else 0)

    def matrices(self, params: Any) -> list[Matrix]:
        """Returns the leaves that are sent as factors."""
        # An alternating iteration sends one of two factors, half as much on average.
        factors = self.iterations * (0.5 if self.alternate else 1.0)
        return lowrank.find(
            params,
            self.stacked,
            lambda rows, columns: saves(rows, columns, self.rank, self.min_saving * factors),
        )

    def _rank(self, matrix: Matrix) -> int:
        return min(self.rank, matrix.rows, matrix.columns)

    def _draw(self, matrices: Sequence[Matrix], count: jax.Array | int) -> list[jax.Array]:
        columns, ranks = [m.columns for m in matrices], [self._rank(m) for m in matrices]
        return lowrank.random_factors(matrices, columns, ranks, self.seed, count)

    def _pairs(
        self, matrices: Sequence[Matrix], own: list[jax.Array], whole: Any, rest: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], Any, list[jax.Array]]:
        """Sums P, then Q; returns the sums, what a device's matrices lack, state, other leaves."""
        q = [whole["q"][m.path] for m in matrices]
        p, own_q, q, rest = power_iterations(own, q, rest, self.iterations, self.axes)
        found = [lowrank.outer(*pair) for pair in zip(p, q, strict=True)]
        left = [matrix - lowrank.outer(*pair) for matrix, *pair in zip(own, p, own_q, strict=True)]
        count = whole["count"] + 1
        fresh = self._draw(matrices, count)
        if self.warm_start:
            fresh = [revived(*pair) for pair in zip(q, fresh, strict=True)]
        return found, left, {"count": count, "q": named(matrices, fresh)}, rest

    def _alternating(
        self, matrices: Sequence[Matrix], own: list[jax.Array], whole: Any, rest: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], Any, list[jax.Array]]:
        """Sums one factor an iteration; returns as `_pairs` does."""
        p, q = ([whole[side][m.path] for m in matrices] for side in "pq")
        found = [jnp.zeros_like(matrix) for matrix in own]
        for iteration in range(self.iterations):
            columns_next = (self.turn + iteration) % 2 == 0
            given = lowrank.orthonormalise(p if columns_next else q)
            product = lowrank.transposed_times if columns_next else lowrank.times
            mine = [product(*pair) for pair in zip(own, given, strict=True)]
            sums = lowrank.add_up([*mine, *rest] if iteration == 0 else mine, self.axes)
            if iteration == 0:
                rest = sums[len(mine) :]
            sums = sums[: len(mine)]
            left, right = (given, mine) if columns_next else (mine, given)
            own = [m - lowrank.outer(*pair) for m, *pair in zip(own, left, right, strict=True)]
            left, right = (given, sums) if columns_next else (sums, given)
            found = [f + lowrank.outer(*pair) for f, *pair in zip(found, left, right, strict=True)]
            p, q = left, right
        count = whole["count"] + 1
        rows, ranks = [m.rows for m in matrices], [self._rank(m) for m in matrices]
        fresh = lowrank.random_factors(matrices, rows, ranks, self.seed + 1, count)
        p = [revived(*pair) for pair in zip(p, fresh, strict=True)]
        q = [revived(*pair) for pair in zip(q, self._draw(matrices, count), strict=True)]
        return found, own, {"count": count, "q": named(matrices, q), "p": named(matrices, p)}, rest


def power_iterations(
    own: Sequence[jax.Array],
    q: list[jax.Array],
    rest: Sequence[jax.Array],
    iterations: int,
    axes: tuple[str, ...],
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Approximates the sums of matrices over devices.

    Args:
      own: this device's matrices, stacks (layers, rows, columns).
      q: factors to begin with, (layers, columns, rank).
      rest: further arrays to sum, which travel with the first factors.
      iterations: number of iterations, of two collectives each.
      axes: mesh axes to sum over.

    Returns:
      P with orthonormal columns; this device's M^T P; its sum Q; the sums of `rest`.
    """
    others: list[jax.Array] = []
    for iteration in range(iterations):
        p = [lowrank.times(*pair) for pair in zip(own, lowrank.orthonormalise(q), strict=True)]
        sums = lowrank.add_up([*p, *rest] if iteration == 0 else p, axes)
        others = sums[len(p) :] if iteration == 0 else others
        p = lowrank.orthonormalise(sums[: len(p)])
        mine = [lowrank.transposed_times(*pair) for pair in zip(own, p, strict=True)]
        q = lowrank.add_up(mine, axes)
    return p, mine, q, others


def saves(rows: int, columns: int, rank: int, times: float) -> bool:
    """Returns whether a matrix has more than `times` the values of its factors."""
    return rows * columns > times * min(rank, rows, columns) * (rows + columns)


def revived(factor: jax.Array, fresh: jax.Array) -> jax.Array:
    """Returns a factor with `fresh` in place of columns of zeros, which would stay zeros."""
    return jnp.where(jnp.any(factor != 0, axis=1, keepdims=True), factor, fresh)


def named(matrices: Sequence[Matrix], values: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Returns values by their matrix's path."""
    return {m.path: value for m, value in zip(matrices, values, strict=True)}


def with_errors(
    leaves: Sequence[jax.Array], matrices: Sequence[Matrix], errors: Any
) -> list[jax.Array]:
    """Returns the leaves that are sent as factors, as matrices, with the errors added if any."""
    return [
        lowrank.to_matrices(
            leaves[m.number].astype(jnp.float32) + errors[m.path] if errors else leaves[m.number], m
        )
        for m in matrices
    ]


def whole_leaves(leaves: Sequence[jax.Array], matrices: Sequence[Matrix]) -> list[jax.Array]:
    """Returns the leaves that are not among `matrices`."""
    sent = {m.number for m in matrices}
    return [leaf for index, leaf in enumerate(leaves) if index not in sent]


def merged(
    leaves: Sequence[jax.Array],
    matrices: Sequence[Matrix],
    found: Sequence[jax.Array],
    rest: Sequence[jax.Array],
) -> list[jax.Array]:
    """Returns all leaves in their order, from matrices and the other leaves."""
    by_index = {
        m.number: value.reshape(leaves[m.number].shape)
        for m, value in zip(matrices, found, strict=True)
    }
    others = iter(rest)
    return [by_index[i] if i in by_index else next(others) for i in range(len(leaves))]


def staged(exchange: Any, **values: Any) -> Any:
    """Returns an exchange with other values of fields that are no options."""
    found = copy.copy(exchange)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def check_counts(exchange: Any, least: dict[str, int]) -> None:
    """Raises ValueError for an option that is not a whole number of at least the given one."""
    for name, smallest in least.items():
        value = getattr(exchange, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(
                f"{name} is {value!r}, but it must be a whole number of at least {smallest}"
            )


def check_stacked(patterns: Sequence[str]) -> None:
    """Raises ValueError for what is no tuple of regular expressions."""
    for pattern in patterns if isinstance(patterns, tuple) else [patterns]:
        try:
            if isinstance(patterns, tuple) and isinstance(pattern, str):
                re.compile(pattern)
                continue
        except re.error:
            pass
        raise ValueError(f"stacked is {patterns!r}, but it must be a tuple of regular expressions")


def check_matrices(exchange: Any, params: Any) -> None:
    """Raises ValueError if no leaf is sent as factors, or a regex of `stacked` matches none."""
    paths = parameters.leaf_paths(params)
    for pattern in exchange.stacked:
        if not any(parameters.matches(pattern, path) for path in paths):
            raise ValueError(
                f"stacked has the regex {pattern!r}, which matches no parameter; they are: "
                f"{', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}"
            )
    if not exchange.matrices(params):
        raise ValueError(no_matrix(params, exchange.stacked, exchange.rank))


def no_matrix(params: Any, stacked: Sequence[str], rank: int) -> str:
    """Returns the message that no leaf is worth factors of this rank."""
    every = lowrank.find(params, stacked, lambda rows, columns: True)
    if not every:
        return f"rank is {rank}, but the model has no matrix: no parameter has two axes"
    m = max(every, key=lambda m: min(m.rows, m.columns))
    return (
        f"rank is {rank}, at which factors save too little in every matrix: the largest is "
        f"{m.path} with {m.rows} x {m.columns}; give a lower rank, or a lower min_saving"
    )
