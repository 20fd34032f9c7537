"""Branches of a run: from one of its checkpoints on, the same examples at larger batches."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import optax
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.optim import scaling
from lamb_tpu.parallel.state import TrainState, resumed
from lamb_tpu.run import checks, memory
from lamb_tpu.run.build import Run, make_optimizer
from lamb_tpu.run.preflight import train_check
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.position import Position

# A branch is measured after these parts of it: its end alone would have the noise of one update.
_MEASURED = (5 / 8, 6 / 8, 7 / 8, 1.0)


def own_scaling(config: ConfigDict) -> str:
    """Returns the rule by which a run's rate follows its batch: 'identity', 'linear' or 'sqrt'.

    LEGW's rule for the rate is 'sqrt'. What it says of the warm-up has no meaning in a branch.
    """
    rule = config.schedule.scaling
    if rule == "random_matrix":
        return scaling.random_matrix_rule(config.optimizer.name)
    return "sqrt" if rule == "legw" else rule


def measured_at(span: int, factors: Sequence[int]) -> list[int]:
    """Returns the updates of a branch after which branches of all factors are measured.

    >>> measured_at(64, [1, 2, 4, 8])
    [40, 48, 56, 64]
    >>> measured_at(16, [1, 2, 4])
    [12, 16]

    Args:
      span: length of a branch in updates of the run, a multiple of every factor.
      factors: batches in batches of the run.
    """
    unit = math.lcm(*factors)
    return sorted({math.ceil(part * span / unit) * unit for part in _MEASURED})


def widened(run: Run, starts: Sequence[int], factor: int, rate_factor: float) -> Run:
    """Returns the run at `factor` times its batch, for branches from the updates `starts`.

    It has `factor` times the microbatches, so that memory and the groups of BatchNorm stay as they
    are. An update of a branch has the schedule's rate at the examples seen before it, times
    `rate_factor`. Everything else that counts updates, such as bias correction, counts those of the
    branch. With weight_decay_scaling='timescale' the weight decay keeps AdamW's timescale.

    Args:
      run: the run.
      starts: completed updates from which branches start, ascending. One program serves all, so a
        branch must not go on beyond the start of the next.
      factor: batch in batches of the run.
      rate_factor: learning rate in learning rates of the run.

    Raises:
      UserError: the batch needs too much memory, or the model cannot work on microbatches.
    """
    config = run.config.copy_and_resolve_references()
    config.batch_size *= factor
    config.accumulation_steps *= factor

    def of(start: int) -> optax.Schedule:
        return lambda count: rate_factor * run.recipe.learning_rate(start + factor * count)

    recipe = dataclasses.replace(
        run.recipe,
        batch_size=config.batch_size,
        # No update lies before the first start.
        learning_rate=optax.join_schedules([optax.constant_schedule(0), *map(of, starts)], starts),
        weight_decay=run.recipe.weight_decay and run.recipe.weight_decay * factor / rate_factor,
    )
    state = run.abstract_state
    memory.check_memory(state, run.mesh, config.batch_size, run.train_set.element_spec)
    checks.check_statistics(config, state, run.train_set)
    tx = make_optimizer(config, recipe, state.params, run.layout)
    return dataclasses.replace(run, config=config, recipe=recipe, tx=tx)


class Branches:
    """Branches of a run at several batches, from several of its checkpoints.

    Args:
      run: the run, of one process, whose data are no streams.
      checkpoints: its checkpoints.
      starts: completed updates of those from which branches start, ascending.
      factors: the batches, in batches of the run.
      rule: rule by which the rate follows the batch, of `optim.scaling.SCALING_RULES`.

    Attributes:
      rate_factors: learning rate at each batch, in rates of the run, by the batch's factor.

    Raises:
      UserError: see `widened`.
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
        # Each is compiled once, for the branches from all places.
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
        """Trains a branch and returns its losses.

        Args:
          start: one of the starts.
          factor: one of the factors.
          seed: seed of the order of the examples. With that of the run, the branch reads what the
            run itself read behind the checkpoint.
          at: when the branch is measured, in updates of the run since its start: ascending
            multiples of the factor, of which the last ends the branch.
          measure: returns the loss of a state.
          trained: called after each update with its number of examples.

        Returns:
          The loss at each of `at`; NaN or infinite if the branch has diverged.

        Raises:
          UserError: the checkpoint is missing or damaged.
        """
        run, wide, step = self._run, self._runs[factor], self._steps[factor]
        # Read again for each branch, because a second copy would need memory that the run does not.
        state, saved = self._checkpoints.restore(start, run.saved_state)
        state = resumed(state, run.parts)
        # With the run's own batch size, because the order of batches of like lengths depends on it.
        loader = data.TrainLoader(
            run.train_set, run.config.batch_size, seed, check=train_check(run)
        )
        loader.restore({**(Position.from_json(saved).loader or {}), "seed": seed})
        batch_size, rows = wide.config.batch_size, wide.local_rows()
        losses = []
        for update in range(1, at[-1] // factor + 1):
            state, sums = step(state, wide.shard_batch(loader.take(batch_size, rows)))
            jax.block_until_ready(sums)  # otherwise batches would queue up in memory
            trained(batch_size)
            if update * factor in at:
                losses.append(measure(state))
        return losses
