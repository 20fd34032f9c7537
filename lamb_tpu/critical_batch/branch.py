"""Branches of a run: they continue from a checkpoint on the same examples, with larger batches."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import optax

from lamb_tpu import data
from lamb_tpu.optim import scaling
from lamb_tpu.parallel.state import TrainState, resumed
from lamb_tpu.run import checks, memory
from lamb_tpu.run.build import Run
from lamb_tpu.run.preflight import train_check
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.position import Position

# Fractions of a branch after which its loss is measured: a measurement at the end alone would have the
# noise of one update.
_MEASURED = (5 / 8, 6 / 8, 7 / 8, 1.0)


def default_scaling(rule: str, optimizer: str) -> str:
    """Returns the rule by which a run's learning rate scales with the batch size.

    The rule is 'identity', 'linear' or 'sqrt'. For LEGW it is 'sqrt'; LEGW's rule for the warm-up does
    not apply to a branch.
    """
    if rule == "random_matrix":
        return scaling.random_matrix_rule(optimizer)
    return "sqrt" if rule == "legw" else rule


def measured_at(span: int, factors: Sequence[int]) -> list[int]:
    """Returns the updates after which branches of all factors are measured.

    `span`, the length of a branch in updates of the run, is a multiple of every factor.

    >>> measured_at(64, [1, 2, 4, 8])
    [40, 48, 56, 64]
    >>> measured_at(16, [1, 2, 4])
    [12, 16]
    """
    unit = math.lcm(*factors)
    return sorted({math.ceil(fraction * span / unit) * unit for fraction in _MEASURED})


def widened(run: Run, starts: Sequence[int], factor: int, rate_factor: float) -> Run:
    """Returns the run at `factor` times its batch size, for branches from the updates `starts`.

    The number of microbatches is multiplied by `factor`, so memory use and BatchNorm groups are the same. The
    learning rate of an update is the schedule's rate at the examples seen before it, times
    `rate_factor`. Everything else that counts updates, such as bias correction, counts updates of the
    branch. With weight_decay_scaling='timescale' the weight decay keeps AdamW's timescale.

    `starts` ascend. One program serves all branches, so a branch must end before the next start.
    """
    spec = dataclasses.replace(
        run.spec,
        batch_size=run.spec.batch_size * factor,
        accumulation_steps=run.spec.accumulation_steps * factor,
    )

    def schedule_from(start: int) -> optax.Schedule:
        return lambda count: rate_factor * run.recipe.learning_rate(start + factor * count)

    recipe = dataclasses.replace(
        run.recipe,
        batch_size=spec.batch_size,
        # There are no updates before the first start.
        learning_rate=optax.join_schedules(
            [optax.constant_schedule(0), *map(schedule_from, starts)], starts
        ),
        weight_decay=run.recipe.weight_decay and run.recipe.weight_decay * factor / rate_factor,
    )
    state = run.abstract_state
    memory.check_memory(state, run.mesh, spec.batch_size, run.train_set.element_spec)
    checks.check_statistics(spec, run.plain_task, state, run.train_set)
    return dataclasses.replace(run, spec=spec, recipe=recipe, tx=run.make_optimizer(recipe))


class Branches:
    """Branches of a run at several batch sizes, from several of its checkpoints.

    The run is in one process, and its data are not streams. `starts` are the checkpoints' numbers of
    completed updates, ascending. `factors` are multiples of the run's batch size. `rule` is a key of
    `optim.scaling.SCALING_RULES`.

    Attributes:
      rate_factors: for each factor, the number by which the run's learning rate is multiplied.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        starts: Sequence[int],
        factors: Sequence[int],
        rule: str,
    ) -> None:
        self._run, self._checkpoints = run, checkpoints
        self.rate_factors = {
            factor: scaling.scale_learning_rate(rule, 1.0, 1, factor) for factor in factors
        }
        self._runs = {
            factor: run if factor == 1 else widened(run, starts, factor, rate)
            for factor, rate in self.rate_factors.items()
        }
        # Each step is compiled once, for branches from all positions.
        self._steps = {factor: wide.make_train_step() for factor, wide in self._runs.items()}

    def losses(
        self,
        start: int,
        factor: int,
        seed: int,
        at: Sequence[int],
        measure: Callable[[TrainState], float],
        trained: Callable[[int], None] = lambda examples: None,
    ) -> list[float]:
        """Trains a branch and returns its losses, which are NaN or infinite if the branch diverges.

        Args:
          start: an element of `starts`.
          factor: an element of `factors`.
          seed: seed of the order of the examples. With the run's seed, the branch reads the examples
            that the run read after the checkpoint.
          at: when to measure the branch, in updates of the run since the branch's start: ascending
            multiples of the factor. The branch ends at the last of them.
          measure: returns the loss of a state.
          trained: called after each update with the update's number of examples.
        """
        run, wide, step = self._run, self._runs[factor], self._steps[factor]
        # Read the checkpoint again for each branch: a second copy would need additional memory.
        state, saved = self._checkpoints.restore(start, run.saved_state)
        state = resumed(state, run.parts)
        # Use the run's batch size, because the order of bucketed examples depends on the batch size.
        loader = data.TrainLoader(run.train_set, run.spec.batch_size, seed, check=train_check(run))
        loader.restore({**(Position.from_json(saved).loader or {}), "seed": seed})
        batch_size, rows = wide.spec.batch_size, wide.local_rows()
        losses = []
        for update in range(1, at[-1] // factor + 1):
            state, sums = step(state, wide.shard_batch(loader.take(batch_size, rows)))
            jax.block_until_ready(
                sums
            )  # otherwise the batches of later updates would queue up in memory
            trained(batch_size)
            if update * factor in at:
                losses.append(measure(state))
        return losses
