"""PowerSGD: gradients sent as two thin factors, with error feedback.

Reference: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", https://arxiv.org/abs/1905.13727.
"""

import copy
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lamb_tpu.errors import ArgumentError
from lamb_tpu.optim import parameters
from lamb_tpu.parallel.exchange import lowrank
from lamb_tpu.parallel.exchange.base import Exchange, Residual, check_range, zeros
from lamb_tpu.parallel.exchange.lowrank import Matrix
from lamb_tpu.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class LowRank(Exchange):
    """Base of the exchanges that send matrices as two thin factors, and other leaves uncompressed.

    Leaves with fewer than two axes are sent uncompressed. So are matrices for which factors save too
    little, for example if one side is no longer than the rank.

    Attributes:
      rank: number of columns of the factors.
      start: number of updates, at the beginning of a run, that send everything uncompressed.
      min_saving: a matrix is sent as factors if its number of values is more than `min_saving` times
        that of its factors with `rank` columns.
      error_feedback: whether to add the error to the next gradient.
      seed: seed of the random numbers.
      stacked: regular expressions over paths of leaves; the first axis of these leaves stacks
        layers, as in a scan over layers, and each layer is a matrix. By default a run uses the
        expressions of its model.
      compressing: whether matrices are sent as factors in the current stage, see `at`.
    """

    rank: int = 4
    start: int = 0
    min_saving: float = 2.0
    error_feedback: bool = True
    seed: int = 0
    stacked: tuple[str, ...] = ()
    compressing: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        check_counts(self, rank=1, start=0)
        for pattern in self.stacked if isinstance(self.stacked, tuple) else [None]:
            try:
                re.compile(pattern)
            except (re.error, TypeError):
                problem = "is not a tuple of regular expressions"
                remedy = "use a tuple such as ('layers/',)"
                raise ArgumentError("stacked", self.stacked, problem, remedy) from None

    def init(self, params: Params) -> Residual:
        """Returns zero errors, and random factors.

        Raises ArgumentError if no leaf is sent as factors, or a regex of `stacked` matches no leaf.
        """
        paths, leaves = parameters.leaf_paths(params), jax.tree.leaves(params)
        for pattern in self.stacked:
            if not any(parameters.matches(pattern, path) for path in paths):
                known = f"{', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}"
                remedy = f"use regular expressions that match parameters among {known}"
                raise ArgumentError("stacked", pattern, "matches no parameter", remedy)
        matrices = self.matrices(params)
        if not matrices:
            raise self._no_matrix(params)
        errors = [jnp.zeros(leaves[m.number].shape, jnp.float32) for m in matrices]
        return self._with_errors(self._begun(matrices), named(matrices, errors))

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        leaves, treedef = jax.tree.flatten(grads)
        if not self.compressing:
            return treedef.unflatten(lowrank.add_up(leaves, self.axes)), residual
        matrices = self.matrices(grads)
        errors, own = self._errors(residual), []
        for m in matrices:
            leaf = leaves[m.number].astype(jnp.float32)
            leaf = leaf + errors[m.path] if self.error_feedback else leaf
            own.append(leaf.reshape(m.layers, m.rows, m.columns))
        sent = {m.number for m in matrices}
        rest = [leaf for index, leaf in enumerate(leaves) if index not in sent]
        found, left, rest, after = self._sums(matrices, own, rest, residual)
        shapes = [leaves[m.number].shape for m in matrices]
        left = [error.reshape(shape) for error, shape in zip(left, shapes, strict=True)]
        sums, others = dict(zip((m.number for m in matrices), found, strict=True)), iter(rest)
        reduced = [
            sums[index].reshape(leaf.shape) if index in sums else next(others)
            for index, leaf in enumerate(leaves)
        ]
        return treedef.unflatten(reduced), self._with_errors(after, named(matrices, left))

    def reset(self, residual: Residual) -> Residual:
        """Returns zero errors and unchanged factors: with zero factors all later sums would be 0."""
        return residual._replace(device=zeros(residual.device))

    def at(self, update: int) -> "LowRank":
        """Returns the exchange for an update; before `start`, the exchange sends no factors."""
        return staged(self, compressing=update >= self.start)

    def matrices(self, params: Params) -> list[Matrix]:
        """Returns the leaves that are sent as factors, see `min_saving`."""

        def saves(rows: int, columns: int) -> bool:
            values = min(self.rank, rows, columns) * (rows + columns)
            return rows * columns > self.min_saving * self._factors * values

        return lowrank.find(params, self.stacked, saves)

    @property
    def _factors(self) -> float:
        """Number of pairs of factors that an update sends."""
        return 1.0

    @property
    def _largest_rank(self) -> int:
        return self.rank

    def _begun(self, matrices: Sequence[Matrix]) -> Residual:
        """Returns the residual before the first update, without errors."""
        raise NotImplementedError

    def _sums(
        self,
        matrices: Sequence[Matrix],
        own: list[jax.Array],
        rest: list[jax.Array],
        residual: Residual,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], Residual]:
        """Sums over devices the matrices `own`, which include the errors, and the other leaves, `rest`.

        Returns:
          The sums of the matrices, this device's errors, the sums of `rest`, and the new residual
          without errors.
        """
        raise NotImplementedError

    def _errors(self, residual: Residual) -> Any:
        return residual.device

    def _with_errors(self, residual: Residual, errors: dict[str, jax.Array]) -> Residual:
        return residual._replace(device=errors) if self.error_feedback else residual

    def _draw(
        self, matrices: Sequence[Matrix], count: jax.Array | int, rows: bool = False
    ) -> list[jax.Array]:
        """Returns random Q or, with `rows`, random P."""
        # P and Q have different seeds, because for a square matrix they would be equal.
        side, seed = ("rows", self.seed + 1) if rows else ("columns", self.seed)
        return lowrank.random_factors(matrices, self._largest_rank, seed, count, side)

    def _no_matrix(self, params: Params) -> ArgumentError:
        """Returns the error for parameters of which none is sent as factors."""
        every = lowrank.find(params, self.stacked, lambda rows, columns: True)
        if not every:
            problem = "needs a matrix, but no parameter of the model has two axes"
            return ArgumentError("rank", self.rank, problem, "use another exchange")
        m = max(every, key=lambda m: min(m.rows, m.columns))
        problem = (
            "gives factors that save too little in every matrix: the largest is "
            f"{m.path} with {m.rows} x {m.columns}"
        )
        return ArgumentError("rank", self.rank, problem, "use a lower rank, or a lower min_saving")


@dataclasses.dataclass(frozen=True)
class PowerSGD(LowRank):
    """Sends each matrix M of (rows, columns) as P, (rows, rank), and Q, (columns, rank).

    Let M be a device's gradient plus its error from the previous update. P = M Q is summed over
    devices and made orthonormal, Q = M^T P is summed, and P Q^T is the result. The device stores
    the error of its own matrix, M - P (M^T P)^T. (Most implementations store M minus the mean result
    over devices. The sum of the errors, on which the results depend, is the same. But such errors
    also accumulate the difference between a device's gradients and the mean, without bound.)

    An iteration has two float32 collectives. One sums all P and, in the first iteration, the
    uncompressed leaves; the other sums all Q. If a column of Q became 0 because the gradient was 0,
    the column restarts from random numbers.

    Attributes, in addition to those of `LowRank`:
      iterations: number of power iterations in an update.
      warm_start: True: begins with the Q of the previous update; False: with random numbers.
      alternate: whether to compute and send only one factor in an iteration, alternately Q from P
        and P from Q, like the authors' package. Each iteration approximates the error that the
        previous iteration left.
      turn: which factor an update of the current stage sends first, see `at`.
    """

    iterations: int = 1
    warm_start: bool = True
    alternate: bool = False
    turn: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, iterations=1)
        check_range("min_saving", self.min_saving, self.min_saving >= 0, "at least 0")
        if self.alternate and not self.warm_start:
            problem = "computes each factor from the previous one, which warm_start=False discards"
            raise ArgumentError("alternate", True, problem, "use warm_start=True")

    def at(self, update: int) -> "PowerSGD":
        """Returns the exchange for an update; with `alternate`, `turn` is 0 if Q comes first, else 1."""
        compressing = update >= self.start
        done = (update - self.start) * self.iterations if compressing and self.alternate else 0
        return staged(self, compressing=compressing, turn=done % 2)

    @property
    def _factors(self) -> float:
        # With `alternate`, an iteration sends one of the two factors: on average half of the values.
        return self.iterations * (0.5 if self.alternate else 1.0)

    def _begun(self, matrices: Sequence[Matrix]) -> Residual:
        whole = {"count": jnp.zeros((), jnp.int32), "q": named(matrices, self._draw(matrices, 0))}
        if self.alternate:
            whole["p"] = named(matrices, self._draw(matrices, 0, rows=True))
        return Residual(whole=whole)

    def _sums(
        self,
        matrices: Sequence[Matrix],
        own: list[jax.Array],
        rest: list[jax.Array],
        residual: Residual,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], Residual]:
        count, whole = residual.whole["count"] + 1, {}
        q = [residual.whole["q"][m.path] for m in matrices]
        if self.alternate:
            p = [residual.whole["p"][m.path] for m in matrices]
            found, left, p, q, rest = self._alternating(own, p, q, rest)
            fresh = self._draw(matrices, count, rows=True)
            whole["p"] = named(matrices, map(revived, p, fresh))
        else:
            found, left, q, rest = power_iterations(own, q, rest, self.iterations, self.axes)
        fresh = self._draw(matrices, count)
        whole["q"] = named(matrices, map(revived, q, fresh) if self.warm_start else fresh)
        return found, left, rest, Residual(whole=whole | {"count": count})

    def _alternating(
        self, own: list[jax.Array], p: list[jax.Array], q: list[jax.Array], rest: list[jax.Array]
    ) -> tuple[list[jax.Array], ...]:
        """Sums one factor per iteration; returns sums, errors, P, Q, and the sums of `rest`."""
        found = [jnp.zeros_like(matrix) for matrix in own]
        for iteration in range(self.iterations):
            columns_next = (self.turn + iteration) % 2 == 0
            given = lowrank.orthonormalise(p if columns_next else q)
            product = lowrank.transposed_times if columns_next else lowrank.times
            mine = [*map(product, own, given)]
            sums = lowrank.add_up([*mine, *rest] if iteration == 0 else mine, self.axes)
            if iteration == 0:
                rest = sums[len(mine) :]
            sums = sums[: len(mine)]
            left, right = (given, mine) if columns_next else (mine, given)
            own = [m - lowrank.outer(*pair) for m, *pair in zip(own, left, right, strict=True)]
            p, q = (given, sums) if columns_next else (sums, given)
            found = [f + lowrank.outer(*pair) for f, *pair in zip(found, p, q, strict=True)]
        return found, own, p, q, rest


def power_iterations(
    own: Sequence[jax.Array],
    q: list[jax.Array],
    rest: Sequence[jax.Array],
    iterations: int,
    axes: tuple[str, ...],
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Approximates the sums of matrices over devices.

    Args:
      own: this device's matrices M, stacks (layers, rows, columns).
      q: initial factors Q, (layers, columns, rank).
      rest: further arrays to sum, which are sent with the first P.
      iterations: number of iterations, with two collectives each.
      axes: mesh axes to sum over.

    Returns:
      The approximate sums P Q^T; this device's errors; Q, the sum over devices of M^T P; the sums of
      `rest`.
    """
    others: list[jax.Array] = []
    for iteration in range(iterations):
        p = [*map(lowrank.times, own, lowrank.orthonormalise(q))]
        sums = lowrank.add_up([*p, *rest] if iteration == 0 else p, axes)
        others = sums[len(p) :] if iteration == 0 else others
        p = lowrank.orthonormalise(sums[: len(p)])
        mine = [*map(lowrank.transposed_times, own, p)]
        q = lowrank.add_up(mine, axes)
    left = [matrix - lowrank.outer(*pair) for matrix, *pair in zip(own, p, mine, strict=True)]
    return [*map(lowrank.outer, p, q)], left, q, others


def revived(factor: jax.Array, fresh: jax.Array) -> jax.Array:
    """Replaces columns of zeros, which would stay zero, by the columns of `fresh`."""
    return jnp.where(jnp.any(factor != 0, axis=1, keepdims=True), factor, fresh)


def named(matrices: Sequence[Matrix], values: Iterable[jax.Array]) -> dict[str, jax.Array]:
    """Returns a dictionary from the path of each matrix to its value."""
    return dict(zip((m.path for m in matrices), values, strict=True))


def staged(exchange: Any, **values: Any) -> Any:
    """Returns a copy of an exchange in which fields that are not options have the given values."""
    found = copy.copy(exchange)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def check_counts(exchange: Any, **least: int) -> None:
    """Raises ArgumentError unless each option in `least` is a whole number of at least its minimum."""
    for name, smallest in least.items():
        value = getattr(exchange, name)
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= smallest
        check_range(name, value, valid, f"a whole number of at least {smallest}")
