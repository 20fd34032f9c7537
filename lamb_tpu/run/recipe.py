"""A recipe: the durations of a config in updates, its learning rate, and its optimizer."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from lamb_tpu import own
from lamb_tpu.batching import path as path_lib
from lamb_tpu.batching.learning_rate import rate_given
from lamb_tpu.batching.rules import Rule
from lamb_tpu.batching.rules.base import Bounded
from lamb_tpu.config import base_config, section_of
from lamb_tpu.errors import UserError
from lamb_tpu.optim import durations, factory, parameters, scaling, schedules
from lamb_tpu.optim.trust_ratio import AxisName
from lamb_tpu.run import batches

SCALINGS = (*scaling.SCALING_RULES, "random_matrix", "legw")

# Keys in config.schedule that belong to one decay; the others need them at their defaults.
DECAY_KEYS = {
    "constant": (),
    "polynomial": ("power", "end_factor"),
    "cosine": ("end_factor",),
    "exponential": ("decay_factor", "decay_every", "staircase", "end_factor"),
    "step": ("decay_factor", "boundaries"),
}


# The facts of parameters under a user's own optimizer that takes no rules.
_NO_RULES = (("", {"decay": False, "adapt": False}),)
# The largest number of updates, which is a day at 1,000 a second.
_MOST_UPDATES = 10**8
# Learning rates are evaluated for so many updates at once: one shape, which is compiled once.
_RATES = 4096


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Durations of a run in updates, and its learning rate.

    Where the batch changes, durations and the schedule run on examples: they are in updates of
    `batch_size`, and the place of an update in them, a fraction, follows from the examples before
    it. Only `total_steps` and arguments called `step` count the run's own updates.

    Attributes:
      batch_size: examples in an update, over all devices.
      num_examples: examples in the training set.
      base_steps: length of the run in updates of `batch_size`.
      peak_learning_rate: learning rate after scaling to the batch size, before warm-up and decay.
      warmup_steps: updates of warm-up; may be a fraction.
      learning_rate: learning rate of update t (the first is t = 0), or at the place t; that of a
        batch that changes is `rate`.
      weight_decay: weight decay scaled to the batch size; None: the config's is used unscaled.
      eval_every, checkpoint_every, log_every: intervals in updates; may be fractions.
      keep_every, desync_every: intervals in updates; may be fractions; 0: never.
      updates_before: difference between the optimizer's counts and the run's own updates; not 0 if
        the counts were kept from another run.
      rule: of a batch that changes; None: it is always `batch_size`.
      path: batch size of every update; None: as for `rule`. Decisions of a rule that needs
        statistics change it during the run, so what asks it of updates to come is of the path as
        it then is.
      rate_scaling: how the rate follows a batch that changes: identity, linear or sqrt.
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
        """Updates of the run; while it is still to be decided, as if the batch stayed."""
        return self.base_steps if self.path is None else self.path.updates

    @property
    def decides(self) -> bool:
        """True if batches are decided during the run, from statistics."""
        return self.rule is not None and bool(self.rule.needs)

    @property
    def learning_rates(self) -> np.ndarray:
        """Learning rate of every update, float32 (total_steps,)."""
        blocks = [self._rates(number) for number in range(-(-self.total_steps // _RATES))]
        return np.concatenate(blocks)[: self.total_steps]

    def rate(self, step: int) -> float:
        """Returns the learning rate of the update after `step` completed ones.

        It is a number of the host, so that a step of work on a device is rarely waited for.
        """
        number, place = divmod(step, _RATES)
        decisions = 0 if self.path is None else self.path.decisions
        return float(self._kept_rates(number, decisions)[place])

    @functools.cached_property
    def _kept_rates(self) -> Callable[[int, int], np.ndarray]:
        """`_rates`, of which the last call's are kept until the path is another."""
        return functools.lru_cache(1)(lambda number, decisions: self._rates(number))

    @functools.cached_property
    def _schedule(self) -> Callable[[np.ndarray], jax.Array]:
        return jax.jit(self.learning_rate)

    def _rates(self, number: int) -> np.ndarray:
        """Returns the learning rates of a block of `_RATES` updates, or of those that it has."""
        start = number * _RATES
        if self.path is None:
            return np.asarray(self._schedule(np.arange(start, start + _RATES, dtype=np.int32)))
        sizes = self.path.batches(start, start + _RATES)
        places = np.zeros(_RATES, np.float32)
        before = self.path.examples(start) + np.cumsum(sizes) - sizes
        places[: len(sizes)] = before / self.batch_size
        rates = np.asarray(self._schedule(places))[: len(sizes)]
        return (rates * batches.factors(sizes, self.rate_scaling, self.batch_size)).astype(
            np.float32
        )

    @property
    def smallest_batch(self) -> int:
        """The smallest batch size of an update, except for a last one that is cut."""
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
        """Returns the batch size of the update after `step` completed ones."""
        return self.batch_size if self.path is None else self.path.batch(step)

    def examples(self, step: int) -> int:
        """Returns the examples of `step` updates."""
        return step * self.batch_size if self.path is None else self.path.examples(step)

    def place(self, step: int) -> float:
        """Returns `step` updates in updates of `batch_size`, in which durations are."""
        return step if self.path is None else self.path.examples(step) / self.batch_size

    def is_decision_due(self, step: int) -> bool:
        """Returns whether `step` updates are followed by a decision that needs their statistics."""
        return self.rule is not None and self.decides and self.rule.due(step)

    def epoch(self, step: float) -> float:
        """Returns the epochs after `step` updates, as a fraction."""
        done = step * self.batch_size if self.path is None else self.path.examples(int(step))
        return done / self.num_examples

    def is_due(self, every: float, step: int) -> bool:
        """Returns whether an event is due at update `step` (counted from 1).

        It is due at every multiple of `every` and at the last update; never if `every` is 0.

        With fractional intervals (an epoch is rarely a whole number of updates) the k-th event is
        due at the first update at or after k intervals.
        """
        if not every:
            return False
        # Slightly above the multiple, against rounding of k * every.
        tolerance = 1e-9
        before, now = self.place(step - 1), self.place(step)
        passed = math.floor(now / every + tolerance) > math.floor(before / every + tolerance)
        return passed or step == self.total_steps

    def is_save_due(self, step: int) -> bool:
        """Returns whether to save update `step`, as one of the newest or one to keep."""
        return self.is_due(self.checkpoint_every, step) or self.is_due(self.keep_every, step)

    def describe(self) -> str:
        """Returns lines for the terminal: two, and one for a batch that changes, and warnings."""
        epochs = self.epoch(self.total_steps)
        warmup_epochs = self.warmup_steps * self.batch_size / self.num_examples
        size, path = f"{self.batch_size:,}", ""
        if self.rule is not None and self.path is not None:
            size = f"{self.smallest_batch:,} to {self.largest_batch:,}"
            told = path_lib.describe(self.path)
            if self.decides:
                every = (
                    "every update"
                    if self.rule.interval == 1
                    else (f"{self.rule.interval:,} updates each")
                )
                told += f", then decided after {every} from {', '.join(self.rule.needs)}"
            path = (
                f"batch: {told}; durations and schedule count updates of "
                f"{self.batch_size:,} examples, and the rate follows by {self.rate_scaling!r}\n"
            )
        count = "updates" if self.decides else f"{self.total_steps:,} updates"
        return (
            f"run: {count} of {size} examples = {epochs:.4g} "
            f"epochs of {self.num_examples:,}\n{path}"
            f"learning rate: peak {self.peak_learning_rate:.6g}, warm-up {self.warmup_steps:.6g} "
            f"updates = {warmup_epochs:.4g} epochs; update 0: {self.rate(0):.4g}, "
            f"last: {self.rate(self.total_steps - 1):.4g}"
            + ("" if self.weight_decay is None else f"; weight decay {self.weight_decay:.6g}")
            + self._unreached_peak()
        )

    def _unreached_peak(self) -> str:
        """Returns a further line if the run ends within its warm-up; '' if it does not."""
        if self.warmup_steps <= self.base_steps:
            return ""
        return (
            f"\nwarning: the warm-up of {self.warmup_steps:.6g} updates is longer than the run of "
            f"{self.base_steps:,}, so the learning rate never reaches its peak; lengthen "
            "config.duration or shorten config.schedule.warmup, e.g. to '10 percent'"
        )


def resolve(config: ConfigDict, num_examples: int, updates_before: int = 0) -> Recipe:
    """Resolves every duration and the learning rate for a training set of `num_examples`.

    Scaling rules use the config's batch size, so overriding it rescales the learning rate. Under
    LEGW it also rescales the warm-up, and with weight_decay_scaling the weight decay.

    Raises:
      UserError: a duration or a schedule argument is wrong; the message names the key.
    """

    def in_steps(text: str) -> float:
        # `total_steps` is set below, before the first call: a percentage needs it.
        return durations.parse(text).steps(config.batch_size, num_examples, total_steps)

    def steps(key: str) -> float:
        section, name = key.split(".")
        with naming(f"config.{key}"):
            return in_steps(config[section][name])

    with naming("config.duration"):
        duration = durations.parse(config.duration)
        total_steps = duration.whole_steps(config.batch_size, num_examples)
    if total_steps < 1:
        raise UserError(f"config.duration is {config.duration!r}, which is not one update")
    if total_steps > _MOST_UPDATES:
        raise UserError(
            f"config.duration is {config.duration!r}, which is {total_steps:,} updates of "
            f"{config.batch_size:,} examples; a run has at most {_MOST_UPDATES:,}"
        )

    # The learning rate.
    schedule = config.schedule
    peak, warmup_steps = _peak_and_warmup(config, num_examples, steps("schedule.warmup"))
    hold_steps, decay = steps("schedule.hold"), _decay(schedule, peak, in_steps)
    with naming("config.schedule"):
        learning_rate = schedules.warmup(
            peak,
            # A short trial of a recipe may end in its warm-up: `describe` says so.
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
    # For `is_due` an interval of 0 means never, which makes no sense for these three.
    intervals = {}
    for key in ("eval.every", "checkpoint.every", "log.every"):
        intervals[key] = steps(key)
        if intervals[key] <= 0:
            raise UserError(f"config.{key} is an interval of no length; it must be positive")
    rule, path, rate_scaling = batches.resolve_path(config, total_steps, _MOST_UPDATES)
    return Recipe(
        batch_size=config.batch_size,
        num_examples=num_examples,
        base_steps=total_steps,
        peak_learning_rate=peak,
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        weight_decay=_weight_decay(config, num_examples, peak),
        eval_every=intervals["eval.every"],
        checkpoint_every=intervals["checkpoint.every"],
        # At least one update, which a batch that changes may be a small part of.
        log_every=max(1.0 if path is None else 0.0, intervals["log.every"]),
        keep_every=steps("checkpoint.keep_every"),
        desync_every=steps("guards.desync_every"),
        updates_before=updates_before,
        rule=rule,
        path=path,
        rate_scaling=rate_scaling,
    )


# The keys of durations.
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


def in_epochs(config: ConfigDict) -> str:
    """Returns the first duration in epochs, as "config.KEY is 'N epochs'"; '' without one.

    Only a duration in epochs depends on the number of examples.
    """
    for key in _DURATIONS:
        value = section_of(config, key)[key.rpartition(".")[2]]
        if "epoch" in value:
            return f"config.{key} is {value!r}"
    return ""


def _peak_and_warmup(
    config: ConfigDict, num_examples: int, warmup_steps: float
) -> tuple[float, float]:
    """Returns the scaled peak, and the warm-up in updates, which LEGW rescales too."""
    schedule, rule = config.schedule, config.schedule.scaling
    if rule not in SCALINGS:
        raise UserError(f"config.schedule.scaling is {rule!r}; known: {', '.join(SCALINGS)}")
    base_rate, base_size = config.optimizer.learning_rate, schedule.base_batch_size
    with naming("config.schedule.scaling"):
        if rule == "legw":
            # LEGW keeps the number of warm-up updates, which the duration gives at the base batch.
            warmup = durations.parse(schedule.warmup)
            base_total = durations.parse(config.duration).whole_steps(base_size, num_examples)
            base_steps = warmup.steps(base_size, num_examples, base_total)
            scaled = scaling.legw(
                base_rate, base_steps * base_size / num_examples, base_size, config.batch_size
            )
            return scaled.learning_rate, scaled.warmup_epochs * num_examples / config.batch_size
        if rule == "random_matrix":
            rule = scaling.random_matrix_rule(config.optimizer.name)
        peak = scaling.scale_learning_rate(rule, base_rate, base_size, config.batch_size)
        return peak, warmup_steps


def _decay(schedule: ConfigDict, peak: float, in_steps: Callable[[str], float]) -> dict[str, Any]:
    """Returns the decay of config.schedule as arguments of `schedules.warmup`."""
    decay = schedule.decay
    if decay not in DECAY_KEYS:
        raise UserError(f"config.schedule.decay is {decay!r}; known: {', '.join(DECAY_KEYS)}")
    defaults = base_config().schedule
    # A field of another decay would be ignored without a word.
    for key in sorted({key for keys in DECAY_KEYS.values() for key in keys}):
        if key not in DECAY_KEYS[decay] and schedule[key] != defaults[key]:
            raise UserError(
                f"config.schedule.{key} is {schedule[key]!r}, which has no meaning for the decay "
                f"{decay!r}; it must be {defaults[key]!r}"
            )
    if decay not in ("exponential", "step"):
        return dict(decay=decay, power=schedule.power, end_value=schedule.end_factor * peak)

    factor = schedule.decay_factor
    if not 0 < factor < 1:
        raise UserError(
            f"config.schedule.decay_factor is {factor}; the decay {decay!r} needs one between 0 "
            "and 1, such as 0.1"
        )
    if decay == "exponential":
        with naming("config.schedule.decay_every"):
            every = in_steps(schedule.decay_every)
            return dict(
                decay=schedules.exponential_decay(factor, every, schedule.staircase),
                end_value=schedule.end_factor * peak,
            )
    if schedule.decay_from != "zero":
        raise UserError(
            f"config.schedule.decay_from is {schedule.decay_from!r}; the decay 'step' counts its "
            "boundaries from update 0, so it must be 'zero'"
        )
    with naming("config.schedule.boundaries"):
        edges = [in_steps(text) for text in schedule.boundaries.split(",")]
        return dict(decay=schedules.step_decay(edges, factor))


def _weight_decay(config: ConfigDict, num_examples: int, peak: float) -> float | None:
    """Returns the weight decay that keeps AdamW's timescale; None unless the config asks for it."""
    rule, optimizer = config.schedule.weight_decay_scaling, config.optimizer
    if rule == "identity":
        return None
    if rule != "timescale":
        raise UserError(
            f"config.schedule.weight_decay_scaling is {rule!r}; known: identity, timescale"
        )
    if optimizer.name != "adamw" or "weight_decay" not in optimizer:
        raise UserError(
            "config.schedule.weight_decay_scaling is 'timescale', which needs "
            "config.optimizer.name='adamw' and config.optimizer.weight_decay"
        )
    # A duration in steps sees more data at a larger batch, so each batch size has its data size.
    duration, base_size = durations.parse(config.duration), config.schedule.base_batch_size
    with naming("config.schedule.weight_decay_scaling"):
        timescale = scaling.adamw_timescale(
            optimizer.learning_rate,
            optimizer.weight_decay,
            base_size,
            data_size=base_size * duration.steps(base_size, num_examples),
        )
        return scaling.adamw_weight_decay(
            timescale,
            peak,
            config.batch_size,
            data_size=config.batch_size * duration.steps(config.batch_size, num_examples),
        )


def resolve_optimizer(
    config: ConfigDict, recipe: Recipe, params: Any = None, axis_name: AxisName = None
) -> tuple[optax.GradientTransformation, parameters.Rules]:
    """Returns the config's optimizer with the recipe's learning rate, and its rules.

    Args:
      config: a config.
      recipe: the recipe that `resolve` made of it.
      params: the parameters, or their shapes and dtypes; None: the optimizer is not checked
        against them.
      axis_name: inside shard_map, the mesh axes over which each parameter's update is split.

    Raises:
      UserError: the optimizer or a field is unknown, or a value is refused; with `params`, also a
        value that has no meaning for them.
    """
    fields = config.optimizer.to_dict()
    del fields["learning_rate"]

    def learning_rate(count: Any) -> Any:
        if recipe.path is not None:
            return rate_given(count)
        # Bias correction continues from kept counts, but the schedule starts at 0.
        return recipe.learning_rate(count - recipe.updates_before)

    if recipe.weight_decay is not None:
        fields["weight_decay"] = recipe.weight_decay
    if fields.get("name") == "schedule_free_adamw" and config.ema.decay > 0:
        raise UserError(
            f"config.ema.decay is {config.ema.decay:g}, but the optimizer schedule_free_adamw "
            "keeps an average of the weights itself, at which it is evaluated; it must be 0"
        )
    with naming("config.optimizer"):
        # Only the mesh, the layout and the backend say over which axes an update is split.
        if fields.get("axis_name") is not None:
            raise UserError("axis_name has no meaning in a config: config.parallel decides it")
        fields["name"] = optimizer_of(fields.get("name"))
        rules = _rules(fields)
        # The arguments of a user's own optimizer; `make_optimizer` checks those that all take.
        if callable(fields["name"]):
            known = own.fields(fields["name"], ("learning_rate", "axis_name"))
            given = {key: value for key, value in fields.items() if key in known}
            own.check("config.optimizer", "optimizer", config.optimizer.name, known, given)
        if axis_name is not None:
            fields["axis_name"] = axis_name
        tx = factory.make_optimizer(fields, learning_rate, params)
    return tx, rules


def optimizer_of(name: Any) -> Any:
    """config.optimizer.name as `factory.make_optimizer` takes it: of a user's own the function."""
    return own.find(name, "config.optimizer.name") if own.is_own(name) else name


def _rules(fields: Mapping[str, Any]) -> parameters.Rules:
    """Returns the optimizer's rules, including the default of a config that leaves them out."""
    if "rules" in fields:
        return fields["rules"]
    if not callable(fields["name"]):
        return parameters.DEFAULT_RULES
    own_rules = factory.own_arguments(fields["name"]).get("rules")
    return _NO_RULES if own_rules is None else own_rules.default


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Turns the error that a wrong value raises into a UserError that names a config key."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError, UserError) as error:
        text = " ".join(str(error).split())
        # A message that names its key already is left as it is.
        raise UserError(text if text.startswith("config.") else f"{key}: {text}") from error
