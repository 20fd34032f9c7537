"""The recipe of a run: the durations of its config in updates, and its learning rate."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
import optax

from lamb_tpu.batching import path as path_lib
from lamb_tpu.batching.rules import Rule
from lamb_tpu.batching.rules.base import Bounded
from lamb_tpu.errors import UserError, naming, out_of_range, unknown
from lamb_tpu.optim import durations, scaling, schedules
from lamb_tpu.run import batches, decays
from lamb_tpu.spec import Config, Spec, parse, value_of
from lamb_tpu.spec_keys import Schedule

SCALINGS = (*scaling.SCALING_RULES, "random_matrix", "legw")

_MOST_UPDATES = 10**8  # a day at 1,000 updates a second
# Learning rates are evaluated in blocks of this many updates, so that one shape is compiled.
_RATES = 4096


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Durations of a run in updates, and its learning rate.

    If the batch size changes, durations and the schedule count examples, in units of `batch_size`
    examples; `place` converts a number of updates to this unit. Only `total_steps` and arguments
    named `step` count the actual updates of the run.

    Attributes:
      num_examples: examples in the training set.
      base_steps: length of the run in updates of `batch_size`.
      peak_learning_rate: the schedule's peak, scaled to the batch size.
      learning_rate: schedule; maps an update t (the first is t = 0), or its `place` if the batch
        size changes, to the rate. It ignores `rate_scaling`; see `rate`.
      weight_decay: weight decay scaled to the batch size; None: that of config.optimizer, unscaled.
      warmup_steps, *_every: in updates, possibly fractional; the interval 0 means never.
      updates_before: difference between the optimizer's counts and the run's updates; not 0 if the
        counts continue those of another run.
      rule: rule of a changing batch size; None for a constant batch size.
      path: batch size of each update; None for a constant batch size. If the rule needs statistics,
        the path follows the decisions so far; each new decision makes a new recipe, see `CurrentRecipe`.
      rate_scaling: how the rate scales with a changing batch: identity, linear or sqrt.
    """

    batch_size: int
    num_examples: int
    base_steps: int
    peak_learning_rate: float
    warmup_steps: float
    learning_rate: optax.Schedule
    weight_decay: float | None
    eval_every: float
    checkpoint_every: float
    log_every: float
    keep_every: float
    desync_every: float
    updates_before: int = 0
    rule: Rule | None = None
    path: path_lib.Path | None = None
    rate_scaling: str = "identity"

    @property
    def total_steps(self) -> int:
        """Number of updates of the run, provided that no later decision changes the batch size."""
        return self.base_steps if self.path is None else self.path.updates

    @property
    def decides(self) -> bool:
        """True if statistics decide the batch size during the run."""
        return self.rule is not None and bool(self.rule.needs)

    @property
    def learning_rates(self) -> np.ndarray:
        """The learning rate of each update, float32 (total_steps,)."""
        blocks = [self._rates(number) for number in range(-(-self.total_steps // _RATES))]
        return np.concatenate(blocks)[: self.total_steps]

    def rate(self, step: int) -> float:
        """Returns the learning rate of the update that follows `step` completed updates."""
        number, index = divmod(step, _RATES)
        return float(self._cached_rates(number)[index])

    @functools.cached_property
    def _cached_rates(self) -> Callable[[int], np.ndarray]:
        """The function `_rates`, with the result of its latest call cached."""
        return functools.lru_cache(1)(self._rates)

    @functools.cached_property
    def _schedule(self) -> Callable[[np.ndarray], jax.Array]:
        return jax.jit(self.learning_rate)

    def _rates(self, number: int) -> np.ndarray:
        """Returns the learning rates of a block of up to `_RATES` updates."""
        start = number * _RATES
        if self.path is None:
            return np.asarray(self._schedule(np.arange(start, start + _RATES, dtype=np.int32)))
        sizes = self.path.batches(start, start + _RATES)
        positions = np.zeros(_RATES, np.float32)
        before = self.path.examples(start) + np.cumsum(sizes) - sizes
        positions[: len(sizes)] = before / self.batch_size
        rates = np.asarray(self._schedule(positions))[: len(sizes)]
        return (rates * batches.factors(sizes, self.rate_scaling, self.batch_size)).astype(
            np.float32
        )

    @property
    def smallest_batch(self) -> int:
        """The smallest batch size of an update, apart from a partial last batch."""
        if self.decides and isinstance(self.rule, Bounded):
            return self.rule.smallest
        return self.batch_size if self.path is None else self.path.smallest

    @property
    def largest_batch(self) -> int:
        """The largest batch size of an update."""
        if self.decides and isinstance(self.rule, Bounded):
            return self.rule.upper
        return self.batch_size if self.path is None else self.path.largest

    def batch(self, step: int) -> int:
        """Returns the batch size of the update that follows `step` completed updates."""
        return self.batch_size if self.path is None else self.path.batch(step)

    def examples(self, step: int) -> int:
        """Returns the number of examples in the first `step` updates."""
        return step * self.batch_size if self.path is None else self.path.examples(step)

    def place(self, step: int) -> float:
        """Returns the number of examples in the first `step` updates, divided by `batch_size`."""
        return step if self.path is None else self.path.examples(step) / self.batch_size

    def is_decision_due(self, step: int) -> bool:
        """Returns whether the rule decides from statistics after update `step`."""
        return self.rule is not None and self.decides and self.rule.due(step)

    def epoch(self, step: float) -> float:
        """Returns the number of epochs after `step` updates, as a float."""
        done = step * self.batch_size if self.path is None else self.path.examples(int(step))
        return done / self.num_examples

    def is_due(self, every: float, step: int) -> bool:
        """Returns whether an event is due at update `step` (counted from 1); never if `every` is 0.

        An event is due at each multiple of `every` and at the last update. With a fractional interval
        (an epoch is rarely a whole number of updates), the event is due at the first update at or
        after each multiple.
        """
        if not every:
            return False
        tolerance = 1e-9  # for rounding errors of k * every
        before, now = self.place(step - 1), self.place(step)
        passed = math.floor(now / every + tolerance) > math.floor(before / every + tolerance)
        return passed or step == self.total_steps

    def is_save_due(self, step: int) -> bool:
        """Returns whether to save a checkpoint of update `step`."""
        return self.is_due(self.checkpoint_every, step) or self.is_due(self.keep_every, step)

    def describe(self) -> str:
        """Returns lines for the terminal about length, learning rate, changing batch and warnings."""
        epochs = self.epoch(self.total_steps)
        warmup_epochs = self.warmup_steps * self.batch_size / self.num_examples
        size, path = f"{self.batch_size:,}", ""
        if self.rule is not None and self.path is not None:
            size = f"{self.smallest_batch:,} to {self.largest_batch:,}"
            text = path_lib.describe(self.path)
            if self.decides:
                every = (
                    "every update"
                    if self.rule.interval == 1
                    else (f"every {self.rule.interval:,} updates")
                )
                text += f", then decided after {every} from {', '.join(self.rule.needs)}"
            path = (
                f"batch: {text}; durations and schedule count updates of "
                f"{self.batch_size:,} examples, and the learning rate scales by {self.rate_scaling!r}\n"
            )
        warning = ""
        if self.warmup_steps > self.base_steps:
            warning = (
                f"\nwarning: the warm-up of {self.warmup_steps:.6g} updates is longer than the run "
                f"of {self.base_steps:,}, so the learning rate never reaches its peak; lengthen "
                "config.duration or shorten config.schedule.warmup, e.g. to '10 percent'"
            )
        count = "updates" if self.decides else f"{self.total_steps:,} updates"
        return (
            f"run: {count} of {size} examples = {epochs:.4g} "
            f"epochs of {self.num_examples:,}\n{path}"
            f"learning rate: peak {self.peak_learning_rate:.6g}, warm-up {self.warmup_steps:.6g} "
            f"updates = {warmup_epochs:.4g} epochs; update 0: {self.rate(0):.4g}, "
            f"last: {self.rate(self.total_steps - 1):.4g}"
            + ("" if self.weight_decay is None else f"; weight decay {self.weight_decay:.6g}")
            + warning
        )


class CurrentRecipe:
    """Holds the recipe of a run in progress, which each decision of a batch rule replaces.

    Observers must read `value` each time that they need the recipe.
    """

    def __init__(self, value: Recipe) -> None:
        self.value = value

    def follow(self, path: path_lib.Path) -> None:
        """Replaces the recipe by one with another path of batch sizes."""
        if path is not self.value.path:
            self.value = dataclasses.replace(self.value, path=path)


def resolve(config: Config, num_examples: int, updates_before: int = 0) -> Recipe:
    """Resolves all durations and the learning rate for a training set of `num_examples`.

    Scaling rules use config.batch_size, so overriding this key rescales the learning rate. It also
    rescales the warm-up under LEGW, and the weight decay under weight_decay_scaling.
    """
    spec = parse(config)

    # A percentage needs `total_steps`, which is set before the first call.
    def in_steps(text: str) -> float:
        return durations.parse(text).steps(spec.batch_size, num_examples, total_steps)

    def steps(key: str) -> float:
        with naming(f"config.{key}"):
            return in_steps(value_of(spec, key))

    with naming("config.duration"):
        duration = durations.parse(spec.duration)
        total_steps = duration.whole_steps(spec.batch_size, num_examples)
    if total_steps < 1:
        remedy = "use a longer duration, such as '1 steps'"
        raise UserError("config.duration", spec.duration, "is less than one update", remedy)
    if total_steps > _MOST_UPDATES:
        problem = f"is {total_steps:,} updates of {spec.batch_size:,} examples"
        remedy = f"use at most {_MOST_UPDATES:,} updates"
        raise UserError("config.duration", spec.duration, problem, remedy)

    peak, warmup_steps = _peak_and_warmup(spec, num_examples, steps("schedule.warmup"))
    learning_rate = _schedule(
        spec.schedule, total_steps, peak, warmup_steps, steps("schedule.hold"), in_steps
    )
    # `is_due` treats an interval of 0 as never, which makes no sense for these three keys.
    intervals = {}
    for key in ("eval.every", "checkpoint.every", "log.every"):
        intervals[key] = steps(key)
        if intervals[key] <= 0:
            raise out_of_range(f"config.{key}", value_of(spec, key), "a positive interval")
    rule, path, rate_scaling = batches.resolve_path(spec, total_steps, _MOST_UPDATES)
    return Recipe(
        batch_size=spec.batch_size,
        num_examples=num_examples,
        base_steps=total_steps,
        peak_learning_rate=peak,
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        weight_decay=_weight_decay(spec, num_examples, peak),
        eval_every=intervals["eval.every"],
        checkpoint_every=intervals["checkpoint.every"],
        # At least one update, unless the batch changes: an update may then have fewer examples than
        # `batch_size`, the unit of these intervals.
        log_every=max(1.0 if path is None else 0.0, intervals["log.every"]),
        keep_every=steps("checkpoint.keep_every"),
        desync_every=steps("guards.desync_every"),
        updates_before=updates_before,
        rule=rule,
        path=path,
        rate_scaling=rate_scaling,
    )


def _schedule(
    schedule: Schedule,
    total_steps: int,
    peak: float,
    warmup_steps: float,
    hold_steps: float,
    in_steps: Callable[[str], float],
) -> optax.Schedule:
    before = warmup_steps + hold_steps if schedule.decay_from == "warmup" else 0.0
    span = decays.DecaySpan(
        peak=peak,
        decay_steps=max(total_steps - before, 1.0),
        decay_from=schedule.decay_from,
        in_steps=in_steps,
    )
    decay = decays.arguments(schedule, span)
    with naming("config.schedule", vars(schedule)):
        return schedules.warmup(
            peak,
            # A short trial of a recipe may end in its warm-up; `describe` warns about it.
            max(total_steps, warmup_steps),
            warmup_steps,
            decay_from=schedule.decay_from,
            start_value=schedule.start_factor * peak,
            warmup_power=schedule.warmup_power,
            hold_steps=hold_steps,
            min_value=schedule.min_factor * peak,
            first_step=schedule.first_step,
            **decay,
        )


_DURATIONS = (
    "duration",
    "schedule.warmup",
    "schedule.hold",
    "schedule.decay_every",
    "schedule.boundaries",
    "eval.every",
    "checkpoint.every",
    "checkpoint.keep_every",
    "log.every",
    "guards.desync_every",
)


def in_epochs(spec: Spec) -> str:
    """Returns the first duration in epochs, as "config.KEY is 'N epochs'"; '' if there is none."""
    for key in _DURATIONS:
        value = value_of(spec, key)
        if "epoch" in value:
            return f"config.{key} is {value!r}"
    return ""


def _peak_and_warmup(spec: Spec, num_examples: int, warmup_steps: float) -> tuple[float, float]:
    """Returns the scaled peak rate, and the warm-up in updates, which LEGW scales too."""
    schedule, rule = spec.schedule, spec.schedule.scaling
    if rule not in SCALINGS:
        raise unknown("config.schedule.scaling", rule, SCALINGS)
    base_rate, base_size = spec.optimizer.fields["learning_rate"], schedule.base_batch_size
    with naming("config.schedule.scaling"):
        if rule == "legw":
            # LEGW scales the warm-up epochs with the batch, starting from those at the base batch.
            warmup = durations.parse(schedule.warmup)
            base_total = durations.parse(spec.duration).whole_steps(base_size, num_examples)
            base_steps = warmup.steps(base_size, num_examples, base_total)
            scaled = scaling.legw(
                base_rate, base_steps * base_size / num_examples, base_size, spec.batch_size
            )
            return scaled.learning_rate, scaled.warmup_epochs * num_examples / spec.batch_size
        if rule == "random_matrix":
            rule = scaling.random_matrix_rule(spec.optimizer.name)
        peak = scaling.scale_learning_rate(rule, base_rate, base_size, spec.batch_size)
        return peak, warmup_steps


def _weight_decay(spec: Spec, num_examples: int, peak: float) -> float | None:
    """Returns the weight decay that preserves AdamW's timescale; None if it is not scaled."""
    rule, optimizer = spec.schedule.weight_decay_scaling, spec.optimizer
    if rule == "identity":
        return None
    if rule != "timescale":
        raise unknown("config.schedule.weight_decay_scaling", rule, ("identity", "timescale"))
    # With a duration in steps, a larger batch sees more data, so the data size depends on the batch.
    duration, base_size = durations.parse(spec.duration), spec.schedule.base_batch_size
    with naming("config.schedule.weight_decay_scaling"):
        timescale = scaling.adamw_timescale(
            optimizer.fields["learning_rate"],
            optimizer.fields["weight_decay"],
            base_size,
            data_size=base_size * duration.steps(base_size, num_examples),
        )
        return scaling.adamw_weight_decay(
            timescale,
            peak,
            spec.batch_size,
            data_size=spec.batch_size * duration.steps(spec.batch_size, num_examples),
        )
