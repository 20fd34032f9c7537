"""L-GreCo over PowerSGD: ranks by layer, chosen again from measured errors while training.

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

from lamb_tpu.parallel.exchange import choosing, lowrank, powersgd
from lamb_tpu.parallel.exchange.base import Exchange, Residual, zeros
from lamb_tpu.parallel.exchange.lowrank import Matrix

# As in the authors' code: updates whose gradients are averaged before a measurement, and power
# iterations of it.
WINDOW = 10
ITERATIONS = 5


@dataclasses.dataclass(frozen=True)
class LGreCo(Exchange):
    """Sends as PowerSGD does, each leaf at a rank of its own.

    The last 10 updates of each `interval` are averaged on each device, and the error that every
    rank would leave is measured in the average (the root of the sum of squares over devices). From
    this small table `chosen` takes the ranks that send the least with at most `factor` times the
    error of the uniform rank. The state holds the table, so that a resumed run has the same ranks.
    Each choice needs a program. At most `max_programs` are made; after that the best of the earlier
    choices is taken.

    Attributes:
      axes: mesh axes to sum over.
      num_devices: the product of their sizes.
      rank: the uniform rank, at which leaves are sent before the first choice.
      lower, upper: the least and the largest rank of a leaf, relative to `rank`.
      factor: the budget of errors, relative to that of the uniform rank. As errors are rounded up,
        the uniform ranks themselves are just above a budget of 1.
      interval: number of updates between choices.
      start: number of first updates in which everything is sent whole.
      min_saving: a matrix is sent as factors if it has more than this times their values at `rank`.
      measure: 'power', by power iterations, or 'svd'.
      error_feedback: add what was not sent to the next gradient.
      max_programs: largest number of choices.
      seed: seed of the random numbers.
      stacked: see `PowerSGD`; the layers of one leaf have one rank.
      compressing: the stage, see `at`.
      ranks: the choice, for each leaf that is sent as factors; () before there is one.
    """

    axes: tuple[str, ...]
    num_devices: int
    rank: int = 4
    lower: float = 0.5
    upper: float = 2.0
    factor: float = 1.0
    interval: int = 100
    start: int = 0
    min_saving: float = 2.0
    measure: str = "power"
    error_feedback: bool = True
    max_programs: int = 8
    seed: int = 0
    stacked: tuple[str, ...] = ()
    compressing: bool = dataclasses.field(default=True, init=False)
    ranks: tuple[int, ...] = dataclasses.field(default=(), init=False)

    def __post_init__(self) -> None:
        powersgd.check_counts(self, {"rank": 1, "interval": 1, "start": 0, "max_programs": 1})
        powersgd.check_stacked(self.stacked)
        if not 0 <= self.lower <= 1 <= self.upper:
            raise ValueError(
                f"lower is {self.lower} and upper {self.upper}, but lower must be from 0 to 1 and "
                "upper at least 1"
            )
        for name in ("factor", "min_saving"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must be above 0")
        if self.measure not in ("power", "svd"):
            raise ValueError(f"measure is {self.measure!r}; known: power, svd")

    @property
    def options(self) -> range:
        """The ranks among which a leaf's is chosen."""
        least = max(1, math.floor(self.rank * self.lower))
        return range(least, math.ceil(self.rank * self.upper) + 1)

    def init(self, params: Any) -> Residual:
        """Returns zero errors and averages, random Q of the largest rank, and no measurement.

        Raises ValueError if no leaf would be sent as factors.
        """
        powersgd.check_matrices(self, params)
        matrices = self.matrices(params)
        leaves = jax.tree.leaves(params)
        device = {
            "average": {
                m.path: jnp.zeros((m.layers, m.rows, m.columns), jnp.float32) for m in matrices
            }
        }
        if self.error_feedback:
            device["error"] = {
                m.path: jnp.zeros(leaves[m.number].shape, jnp.float32) for m in matrices
            }
        return Residual(
            device=device,
            whole={
                "count": jnp.zeros((), jnp.int32),
                "q": powersgd.named(matrices, self._draw(matrices, 0)),
                # The norm of the error of each leaf at each rank; 0 before the first measurement.
                "errors": jnp.zeros((len(matrices), len(self.options)), jnp.float32),
                # Choices for which there is a program, in their order; 0 where there is none yet.
                "choices": jnp.zeros((self.max_programs, len(matrices)), jnp.int32),
            },
        )

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        leaves, treedef = jax.tree.flatten(grads)
        if not self.compressing:
            return treedef.unflatten(lowrank.add_up(leaves, self.axes)), residual
        matrices, device, whole = self.matrices(grads), residual.device, residual.whole
        own = powersgd.with_errors(leaves, matrices, device.get("error", ()))
        average, squares = self._measured(matrices, own, device["average"], whole["count"])
        rest = powersgd.whole_leaves(leaves, matrices)
        ranks = self.ranks or (self.rank,) * len(matrices)
        # A Q has as many columns as the largest rank, or as the smaller side of its matrix.
        given = [whole["q"][m.path][:, :, :rank] for m, rank in zip(matrices, ranks, strict=True)]
        p, own_q, q, (*rest, squares) = powersgd.power_iterations(
            own, given, [*rest, squares], 1, self.axes
        )
        new = {"average": average}
        if self.error_feedback:
            new["error"] = {
                m.path: (matrix - lowrank.outer(*pair)).reshape(leaves[m.number].shape)
                for m, matrix, *pair in zip(matrices, own, p, own_q, strict=True)
            }
        found = [lowrank.outer(*pair) for pair in zip(p, q, strict=True)]
        reduced = powersgd.merged(leaves, matrices, found, rest)
        count = whole["count"] + 1
        # Columns beyond the rank are random, for the day it grows.
        fresh = [
            lax.dynamic_update_slice(
                drawn, powersgd.revived(kept, drawn[:, :, : kept.shape[2]]), (0, 0, 0)
            )
            for kept, drawn in zip(q, self._draw(matrices, count), strict=True)
        ]
        measured = count % self.interval == 0
        return treedef.unflatten(reduced), Residual(
            new,
            (),
            {
                "count": count,
                "q": powersgd.named(matrices, fresh),
                "errors": jnp.where(measured, jnp.sqrt(squares), whole["errors"]),
                "choices": _with_choice(whole["choices"], ranks),
            },
        )

    def reset(self, residual: Residual) -> Residual:
        """Returns zero errors and averages. Factors, ranks and the interval go on."""
        return residual._replace(device=zeros(residual.device))

    def skipped(self, before: Residual, after: Residual) -> Residual:
        """Returns the residual before, with a count that goes on: `due` goes by updates."""
        # With an inner axis of the mesh there is a count for each of its devices, all alike.
        begins = jnp.all(self._place(before.whole["count"]) == 0)
        # The window's first update would have discarded the average of the window before.
        average = jax.tree.map(lambda x: jnp.where(begins, 0, x), before.device["average"])
        return before._replace(
            device={**before.device, "average": average},
            whole={**before.whole, "count": after.whole["count"]},
        )

    def at(self, update: int) -> "LGreCo":
        """Returns the exchange of an update: not compressing, or compressing."""
        return powersgd.staged(self, compressing=update >= self.start)

    def due(self, update: int) -> bool:
        """Returns whether `chosen` may change the ranks after `update` completed ones."""
        return update > self.start and (update - self.start) % self.interval == 0

    def chosen(self, params: Any, whole: Any) -> "LGreCo":
        """Returns the exchange with the ranks that the latest measurement gives.

        It is a function of the state alone: a run that is resumed between two measurements gets the
        ranks that it had.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s, as for `init`.
          whole: `Residual.whole`.
        """
        errors, choices = (np.asarray(whole[name], np.float64) for name in ("errors", "choices"))
        if errors.ndim == 3:  # devices of an inner axis have parts of each leaf, and one choice
            errors, choices = np.sqrt(np.sum(errors**2, axis=0)), choices[0]
        sizes = self.sizes(self.matrices(params))
        reference = self.options.index(self.rank)
        choice = choosing.choose(errors, sizes, reference, self.factor)
        if choice is None:  # no measurement yet, or a budget that no ranks keep
            return powersgd.staged(self, ranks=())
        ranks = tuple(self.options[option] for option in choice)
        known = [tuple(map(int, row)) for row in choices if any(row)]
        if ranks not in known and len(known) == self.max_programs:
            ranks = self._best(known, errors, sizes)
        return powersgd.staged(self, ranks=ranks)

    def matrices(self, params: Any) -> list[Matrix]:
        """Returns the leaves that are sent as factors."""
        return lowrank.find(
            params,
            self.stacked,
            lambda rows, columns: powersgd.saves(rows, columns, self.rank, self.min_saving),
        )

    def sizes(self, matrices: Sequence[Matrix]) -> np.ndarray:
        """Returns the number of values that each rank sends of each leaf, (leaves, ranks).

        Ranks above a matrix's smaller side count one value more than the side does, so that they
        are not chosen.
        """
        return np.array(
            [
                [
                    m.layers * (min(rank, m.rows, m.columns) * (m.rows + m.columns))
                    + (rank > min(m.rows, m.columns))
                    for rank in self.options
                ]
                for m in matrices
            ],
            np.float64,
        )

    def _draw(self, matrices: Sequence[Matrix], count: jax.Array | int) -> list[jax.Array]:
        columns = [m.columns for m in matrices]
        ranks = [min(self.options[-1], m.rows, m.columns) for m in matrices]
        return lowrank.random_factors(matrices, columns, ranks, self.seed, count)

    def _measured(
        self, matrices: Sequence[Matrix], own: Sequence[jax.Array], average: Any, count: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Returns the new average, and at the end of an interval its squared errors, else zeros."""
        window, place = min(WINDOW, self.interval), self._place(count)
        kept = [average[m.path] for m in matrices]

        def add() -> list[jax.Array]:
            # Begins with zeros: the average of the interval before is still there.
            return [
                jnp.where(place == 0, 0, sums) + matrix / window
                for sums, matrix in zip(kept, own, strict=True)
            ]

        new = lax.cond(place >= 0, add, lambda: kept)
        starts = self._draw(matrices, count)

        def errors() -> jax.Array:
            return jnp.stack(
                [
                    squared_errors(matrix, start, self.options, self.measure)
                    for matrix, start in zip(new, starts, strict=True)
                ]
            )

        nothing = jnp.zeros((len(matrices), len(self.options)), jnp.float32)
        squares = lax.cond(place == window - 1, errors, lambda: nothing)
        return powersgd.named(matrices, new), squares

    def _place(self, count: jax.Array) -> jax.Array:
        """Returns the position of an update in its window; below 0 before the window begins."""
        return count % self.interval - (self.interval - min(WINDOW, self.interval))

    def _best(
        self, known: Sequence[tuple[int, ...]], errors: np.ndarray, sizes: np.ndarray
    ) -> tuple[int, ...]:
        """Returns the smallest known choice within the budget, or that of the least error."""
        layers = np.arange(len(errors))
        columns = [[self.options.index(rank) for rank in ranks] for ranks in known]
        totals = [float(errors[layers, column].sum()) for column in columns]
        size = [float(sizes[layers, column].sum()) for column in columns]
        target = choosing.budget(errors, self.options.index(self.rank), self.factor)
        within = [index for index, total in enumerate(totals) if total <= target]
        if within:
            return known[min(within, key=lambda index: size[index])]
        return known[int(np.argmin(totals))]


def squared_errors(
    matrices: jax.Array, start: jax.Array, ranks: Sequence[int], measure: str
) -> jax.Array:
    """Returns the squared norm of what approximations of each rank leave out, (ranks,).

    Args:
      matrices: stack (layers, rows, columns); the squares are summed over it.
      start: random numbers for power iterations, (layers, columns, largest rank).
      ranks: the ranks, ascending.
      measure: 'svd', for the best approximations, or 'power', for those of power iterations.
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
        # The first columns are those of an iteration with so many columns, as one becomes
        # orthonormal after the other; each takes its square out of what is left.
        squares = jnp.sum(jnp.square(q), axis=1)
        beyond = jnp.sum(jnp.square(matrices - lowrank.outer(p, q)), axis=(1, 2))
    # Sums from the smallest on: the difference of two large sums would be rounding.
    tails = jnp.cumsum(squares[:, ::-1], axis=1)[:, ::-1]
    tails = jnp.pad(tails, ((0, 0), (0, max(0, ranks[-1] + 1 - tails.shape[1]))))
    return jnp.sum(tails[:, np.asarray(ranks)] + beyond[:, None], axis=0)


def _with_choice(choices: jax.Array, ranks: Sequence[int]) -> jax.Array:
    """Returns the choices with `ranks` in the first free row, unless they are there."""
    row = jnp.asarray(ranks, jnp.int32)
    known = jnp.any(jnp.all(choices == row, axis=1))
    free = jnp.argmin(jnp.any(choices != 0, axis=1))
    full = jnp.all(jnp.any(choices != 0, axis=1))
    return jnp.where(known | full, choices, choices.at[free].set(row))
