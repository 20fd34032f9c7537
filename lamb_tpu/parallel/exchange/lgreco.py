"""L-GreCo with PowerSGD: a rank for each leaf, chosen repeatedly from measured errors.

Reference: see `choosing`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange import choosing, lowrank, powersgd
from lamb_tpu.parallel.exchange.base import Residual, check_range
from lamb_tpu.parallel.exchange.lowrank import Matrix
from lamb_tpu.types import Params

# As in the authors' code: number of updates over which gradients are averaged for a measurement, and
# number of power iterations of a measurement.
WINDOW = 10
ITERATIONS = 5


@dataclasses.dataclass(frozen=True)
class LGreCo(powersgd.LowRank):
    """Sends gradients like PowerSGD, with a separate rank for each leaf.

    Each device averages the gradients of the last 10 updates of each `interval`, and measures the
    error that each rank would make in each leaf of the average. A leaf's error is the root of the
    sum of the devices' squared errors. From this small table of errors, `chosen` takes the ranks
    that send the fewest values with at most `factor` times the total error of the uniform rank. The
    state holds the table, so a resumed run has the same ranks. Each different choice of ranks needs
    a program. After `max_programs` different choices, each later choice is one of these.

    `rank` is the uniform rank, which all leaves have before the first choice. The layers of a leaf
    have the same rank.

    Attributes, in addition to those of `LowRank`:
      lower, upper: the smallest and the largest rank of a leaf, relative to `rank`.
      factor: the error budget, relative to the total error of the uniform rank. Because errors are
        rounded up, the uniform ranks slightly exceed the budget of factor 1.
      interval: number of updates between choices.
      measure: how errors are measured: 'power', by power iterations, or 'svd'.
      max_programs: largest number of different choices of ranks.
      ranks: the chosen rank of each leaf that is sent as factors; () before the first choice.
    """

    lower: float = 0.5
    upper: float = 2.0
    factor: float = 1.0
    interval: int = 100
    measure: str = "power"
    max_programs: int = 8
    ranks: tuple[int, ...] = dataclasses.field(default=(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        powersgd.check_counts(self, interval=1, max_programs=1)
        if not 0 <= self.lower <= 1 <= self.upper:
            problem = f"with upper={self.upper} is out of range"
            raise ArgumentError("lower", self.lower, problem, "use 0 <= lower <= 1 <= upper")
        for name in ("factor", "min_saving"):
            check_range(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        if self.measure not in ("power", "svd"):
            raise ArgumentError("measure", self.measure, "is unknown", "use power or svd")

    @property
    def options(self) -> range:
        """The ranks that a leaf may have."""
        least = max(1, math.floor(self.rank * self.lower))
        return range(least, math.ceil(self.rank * self.upper) + 1)

    @property
    def _largest_rank(self) -> int:
        return self.options[-1]

    def _begun(self, matrices: Sequence[Matrix]) -> Residual:
        """Returns zero averages, random Q of the largest rank, and no measurement."""
        zeros = [jnp.zeros((m.layers, m.rows, m.columns), jnp.float32) for m in matrices]
        return Residual(
            device={"average": powersgd.named(matrices, zeros)},
            whole={
                "count": jnp.zeros((), jnp.int32),
                "q": powersgd.named(matrices, self._draw(matrices, 0)),
                # Norm of the error of each leaf with each rank; 0 before the first measurement.
                "errors": jnp.zeros((len(matrices), len(self.options)), jnp.float32),
                # Rows of ranks for which there is a program, in the order of their choice; unused
                # rows are 0.
                "choices": jnp.zeros((self.max_programs, len(matrices)), jnp.int32),
            },
        )

    def _errors(self, residual: Residual) -> Any:
        return residual.device.get("error")

    def _with_errors(self, residual: Residual, errors: dict[str, jax.Array]) -> Residual:
        found = {"error": errors} if self.error_feedback else {}
        return residual._replace(device=residual.device | found)

    def _sums(
        self,
        matrices: Sequence[Matrix],
        own: list[jax.Array],
        rest: list[jax.Array],
        residual: Residual,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], Residual]:
        device, whole = residual.device, residual.whole
        average, squares = self._measured(matrices, own, device["average"], whole["count"])
        ranks = self.ranks or (self.rank,) * len(matrices)
        # The number of columns of Q is the smaller of the largest rank and its matrix's smaller side.
        given = [whole["q"][m.path][:, :, :rank] for m, rank in zip(matrices, ranks, strict=True)]
        found, left, q, (*rest, squares) = powersgd.power_iterations(
            own, given, [*rest, squares], 1, self.axes
        )
        count = whole["count"] + 1
        # Fill the columns of Q beyond the rank with random numbers, in case the rank grows.
        fresh = [
            lax.dynamic_update_slice(
                drawn, powersgd.revived(kept, drawn[:, :, : kept.shape[2]]), (0, 0, 0)
            )
            for kept, drawn in zip(q, self._draw(matrices, count), strict=True)
        ]
        measured = count % self.interval == 0
        new = {
            "count": count,
            "q": powersgd.named(matrices, fresh),
            "errors": jnp.where(measured, jnp.sqrt(squares), whole["errors"]),
            "choices": _with_choice(whole["choices"], ranks),
        }
        return found, left, rest, Residual({"average": average}, (), new)

    def skipped(self, before: Residual, after: Residual) -> Residual:
        """Returns the residual before the update, but with the new count: `due` counts all updates."""
        # If the mesh has an inner axis, all counts along it are equal.
        begins = jnp.all(self._position(before.whole["count"]) == 0)
        # The first update of a window discards the previous window's average, even if it is skipped.
        average = jax.tree.map(lambda x: jnp.where(begins, 0, x), before.device["average"])
        return before._replace(
            device={**before.device, "average": average},
            whole={**before.whole, "count": after.whole["count"]},
        )

    def due(self, update: int) -> bool:
        """Returns whether `chosen` may change the ranks after `update` completed updates."""
        return update > self.start and (update - self.start) % self.interval == 0

    def chosen(self, params: Params, whole: Any) -> "LGreCo":
        """Returns the exchange with the ranks that the latest measurement gives.

        The ranks are a function of the state, so a run that resumes between two measurements gets
        the same ranks.
        """
        errors, choices = (np.asarray(whole[name], np.float64) for name in ("errors", "choices"))
        if errors.ndim == 3:  # the first axis is over inner devices, which have shards of each leaf
            errors, choices = np.sqrt(np.sum(errors**2, axis=0)), choices[0]
        sizes = self.sizes(self.matrices(params))
        reference = self.options.index(self.rank)
        choice = choosing.choose(errors, sizes, reference, self.factor)
        if choice is None:  # no measurement yet, or no ranks within the budget
            return powersgd.staged(self, ranks=())
        ranks = tuple(self.options[option] for option in choice)
        known = [tuple(map(int, row)) for row in choices if any(row)]
        if ranks not in known and len(known) == self.max_programs:
            ranks = self._best(known, errors, sizes)
        return powersgd.staged(self, ranks=ranks)

    def sizes(self, matrices: Sequence[Matrix]) -> np.ndarray:
        """Returns the number of values that are sent for each leaf with each rank, (leaves, ranks).

        A rank above the smaller side of a matrix counts one value more than the rank that equals
        this side, so that it is not chosen.
        """
        ranks = np.array(self.options)

        def of(m: Matrix) -> np.ndarray:
            side = min(m.rows, m.columns)
            return m.layers * (m.rows + m.columns) * np.minimum(ranks, side) + (ranks > side)

        return np.array([of(m) for m in matrices], np.float64)

    def _measured(
        self, matrices: Sequence[Matrix], own: Sequence[jax.Array], average: Any, count: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Returns the new average and the squared errors of its approximations.

        The errors are 0 except at the last update of an interval.
        """
        window, position = min(WINDOW, self.interval), self._position(count)
        kept = [average[m.path] for m in matrices]

        def add() -> list[jax.Array]:
            # At the start of a window, discard the average of the previous window.
            return [
                jnp.where(position == 0, 0, sums) + matrix / window
                for sums, matrix in zip(kept, own, strict=True)
            ]

        new = lax.cond(position >= 0, add, lambda: kept)
        starts = self._draw(matrices, count)

        def errors() -> jax.Array:
            return jnp.stack(
                [
                    squared_errors(matrix, start, self.options, self.measure)
                    for matrix, start in zip(new, starts, strict=True)
                ]
            )

        nothing = jnp.zeros((len(matrices), len(self.options)), jnp.float32)
        squares = lax.cond(position == window - 1, errors, lambda: nothing)
        return powersgd.named(matrices, new), squares

    def _position(self, count: jax.Array) -> jax.Array:
        """Returns the index of an update in its window; negative before the window begins."""
        return count % self.interval - (self.interval - min(WINDOW, self.interval))

    def _best(
        self, known: Sequence[tuple[int, ...]], errors: np.ndarray, sizes: np.ndarray
    ) -> tuple[int, ...]:
        """Returns the known choice that sends the fewest values within the budget.

        If no known choice is within the budget, returns the known choice with the least error.
        """
        target = choosing.budget(errors, self.options.index(self.rank), self.factor)

        def cost(ranks: tuple[int, ...]) -> tuple[bool, float]:
            columns = [self.options.index(rank) for rank in ranks]
            error, size = (float(t[np.arange(len(t)), columns].sum()) for t in (errors, sizes))
            return (False, size) if error <= target else (True, error)

        return min(known, key=cost)


def squared_errors(
    matrices: jax.Array, start: jax.Array, ranks: Sequence[int], measure: str
) -> jax.Array:
    """Returns the squared norm of the error of an approximation with each rank, (ranks,).

    Args:
      matrices: stack (layers, rows, columns); squared errors are summed over layers.
      start: random numbers for power iterations, (layers, columns, largest rank).
      ranks: the ranks, ascending.
      measure: 'svd' for the best approximations, or 'power' for power iterations.
    """
    if measure == "svd":
        squares = jnp.square(jnp.linalg.svd(matrices, compute_uv=False))
        beyond = jnp.zeros(len(matrices))
    else:

        def iterate(_: Any, factors: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            (q,) = lowrank.orthonormalise([factors[1]])
            (p,) = lowrank.orthonormalise([lowrank.times(matrices, q)])
            return p, lowrank.transposed_times(matrices, p)

        p, q = lax.fori_loop(0, ITERATIONS, iterate, (lowrank.times(matrices, start), start))
        # The first k columns of P and Q equal those of a power iteration with rank k, because
        # columns are orthonormalised one after the other. Each column of Q reduces the squared error
        # by its squared norm.
        squares = jnp.sum(jnp.square(q), axis=1)
        beyond = jnp.sum(jnp.square(matrices - lowrank.outer(p, q)), axis=(1, 2))
    # Sum the squares beyond each rank directly, the last first. The difference of two large sums
    # would be mostly rounding error.
    tails = jnp.cumsum(squares[:, ::-1], axis=1)[:, ::-1]
    tails = jnp.pad(tails, ((0, 0), (0, max(0, ranks[-1] + 1 - tails.shape[1]))))
    return jnp.sum(tails[:, np.asarray(ranks)] + beyond[:, None], axis=0)


def _with_choice(choices: jax.Array, ranks: Sequence[int]) -> jax.Array:
    """Returns the choices with `ranks` in the first free row, unless `ranks` is known or no row is free."""
    row = jnp.asarray(ranks, jnp.int32)
    known = jnp.any(jnp.all(choices == row, axis=1))
    free = jnp.argmin(jnp.any(choices != 0, axis=1))
    full = jnp.all(jnp.any(choices != 0, axis=1))
    return jnp.where(known | full, choices, choices.at[free].set(row))
