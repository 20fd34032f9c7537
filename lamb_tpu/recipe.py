"""A config resolved against the data: every duration in updates, the learning rate in numbers."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.optim import durations, factory, parameters, schedules


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run does, in units of updates.

    Attributes:
      batch_size: global, examples an update.
      num_examples: of the training set.
      total_steps: updates of the run.
      peak_learning_rate: after scaling to the batch size, before warm-up and decay.
      warmup_steps: updates of linear warm-up from 0; may be a fraction.
      learning_rate: learning rate of update t (the first is t = 0).
      eval_every, checkpoint_every, log_every: intervals in updates; may be fractions.
    """

    batch_size: int
    num_examples: int
    total_steps: int
    peak_learning_rate: float
    warmup_steps: float
    learning_rate: optax.Schedule
    eval_every: float
    checkpoint_every: float
    log_every: float

    @functools.cached_property
    def learning_rates(self) -> np.ndarray:
        """The learning rate of every update, (total_steps,): for logs, without work on a device."""
        return np.asarray(jax.jit(self.learning_rate)(np.arange(self.total_steps)))

    def is_due(self, every: float, step: int) -> bool:
        """Whether a multiple of `every` falls on update `step` (counted from 1), or it is the last.

        With fractional intervals (an epoch is rarely a whole number of updates) the k-th event
        comes at the first whole update at or after k intervals.
        """
        # A hair above the multiple, against rounding of k * every.
        tolerance = 1e-9
        passed = math.floor(step / every + tolerance) > math.floor((step - 1) / every + tolerance)
        return passed or step == self.total_steps

    def describe(self) -> str:
        """Two lines for the terminal."""
        epochs = self.total_steps * self.batch_size / self.num_examples
        warmup_epochs = self.warmup_steps * self.batch_size / self.num_examples
        return (
            f"run: {self.total_steps:,} updates of {self.batch_size:,} examples = {epochs:.4g} "
            f"epochs of {self.num_examples:,}\n"
            f"learning rate: peak {self.peak_learning_rate:.6g}, warm-up {self.warmup_steps:.6g} "
            f"updates = {warmup_epochs:.4g} epochs; update 0: {self.learning_rates[0]:.4g}, "
            f"last: {self.learning_rates[-1]:.4g}"
        )


def resolve(config: ConfigDict, num_examples: int) -> Recipe:
    """Resolves every duration and the learning rate for a training set of `num_examples`.

    Scaling rules are evaluated from the config's batch size, so overriding it rescales the rate
    (and under LEGW the warm-up).

    Raises:
      UserError: a duration or a schedule argument is wrong; the message names the key.
    """

    def steps(key: str, total_steps: int | None) -> float:
        section, _, name = key.rpartition(".")
        text = (config[section] if section else config)[name]
        with naming(f"config.{key}"):
            return durations.parse(text).steps(config.batch_size, num_examples, total_steps)

    with naming("config.duration"):
        duration = durations.parse(config.duration)
        total_steps = duration.whole_steps(config.batch_size, num_examples)
    if total_steps < 1:
        raise UserError(f"config.duration is {config.duration!r}, which is not one update")

    schedule = config.schedule
    warmup_steps = steps("schedule.warmup", total_steps)
    if schedule.decay == "constant" and schedule.end_factor:
        raise UserError(
            f"config.schedule.end_factor is {schedule.end_factor}, which has no meaning for the "
            "decay 'constant'; it must be 0"
        )
    with naming("config.schedule"):
        peak = config.optimizer.learning_rate
        if schedule.scaling == "legw":
            # LEGW keeps the warm-up's updates: those of the given duration at the base batch.
            warmup = durations.parse(schedule.warmup)
            base_total = duration.whole_steps(schedule.base_batch_size, num_examples)
            base_steps = warmup.steps(schedule.base_batch_size, num_examples, base_total)
            base_epochs = base_steps * schedule.base_batch_size / num_examples
            scaled = schedules.legw(peak, base_epochs, schedule.base_batch_size, config.batch_size)
            peak, warmup_steps = (
                scaled.learning_rate, scaled.warmup_epochs * num_examples / config.batch_size
            )
        else:
            peak = schedules.scale_learning_rate(
                schedule.scaling, peak, schedule.base_batch_size, config.batch_size
            )
        learning_rate = schedules.warmup(
            peak,
            total_steps,
            warmup_steps,
            decay=schedule.decay,
            power=schedule.power,
            end_value=schedule.end_factor * peak,
            decay_from=schedule.decay_from,
        )
    intervals = {}
    for key in ("eval.every", "checkpoint.every", "log.every"):
        intervals[key] = steps(key, total_steps)
        if intervals[key] <= 0:
            raise UserError(f"config.{key} is an interval of no length; it must be positive")
    return Recipe(
        batch_size=config.batch_size,
        num_examples=num_examples,
        total_steps=total_steps,
        peak_learning_rate=peak,
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        eval_every=intervals["eval.every"],
        checkpoint_every=intervals["checkpoint.every"],
        log_every=max(1.0, intervals["log.every"]),
    )


def resolve_optimizer(
    config: ConfigDict, recipe: Recipe
) -> tuple[optax.GradientTransformation, parameters.Rules]:
    """The config's optimizer with the recipe's learning rate, and the rules it works by.

    Raises:
      UserError: an unknown optimizer or field, or a value that it refuses.
    """
    fields = config.optimizer.to_dict()
    del fields["learning_rate"]
    with naming("config.optimizer"):
        tx = factory.make_optimizer(fields, recipe.learning_rate)
    return tx, fields.get("rules", parameters.DEFAULT_RULES)


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Turns what a wrong value raises into a UserError that begins with a config's key."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError, UserError) as error:
        text = " ".join(str(error).split())
        raise UserError(text if text.startswith("config.") else f"{key}: {text}") from error
