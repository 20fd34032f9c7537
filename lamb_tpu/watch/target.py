"""What a run is to reach: the first evaluation that does, and how long that took.

Time to a target is how MLPerf compares training runs. `config.target` names a metric of the
evaluation and its value. The clock of `seconds` begins with the first update and goes on through
training, evaluation and saving; `seconds_with_startup` has in it besides what comes before: reading
data, initial weights or the checkpoint, compiling. Both add up over the starts of a run. The time
between two starts is in neither, nor is that of updates which were lost because a start was killed
before it had saved them; `starts` tells over how many starts a time is spread. (MLPerf's own clock
may not be paused, so only a time of one start compares with its results.)

A run that is used again must have the same metric, value and mode: the first evaluation to reach
another target may lie before the checkpoint, and its time is not known any more. `stop` is free: it
changes no number, so a run that has ended at its target goes on with `config.target.stop=False`.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.watch.observer import Observer, Start


class Target(Observer):
    """Remembers the first evaluation that reaches the target.

    Args:
      config: `config.target`.
      recipe: of the run, for epochs.
      tell: shows a line.

    Attributes:
      reached: `step` (completed updates), `epoch`, `value` of the metric, and the time it took:
        `seconds`, `seconds_with_startup`, `starts`. None before.
    """

    name = "target"

    def __init__(self, config: ConfigDict, recipe: Recipe, tell: Callable[[str], None]) -> None:
        self._config, self._recipe, self._tell = config, recipe, tell
        self.may_end_run = bool(config.metric) and config.stop
        self.reached: dict[str, float] | None = None

    def check(self, names: Collection[str]) -> None:
        """Refuses a metric that an evaluation with these does not have."""
        metric = self._config.metric
        if metric and metric not in names:
            raise UserError(
                f"config.target.metric is {metric!r}; the evaluation's metrics are: "
                f"{', '.join(sorted(names))}"
            )

    @property
    def end_reason(self) -> str:
        """'stopped at its target' once an evaluation has reached it, unless it is not to stop."""
        return "stopped at its target" if self.may_end_run and self.reached is not None else ""

    def started(self, start: Start) -> None:
        self._start = start

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks whether an evaluation is the first that reaches the target. NaN reaches nothing."""
        if not self._config.metric or self.reached is not None:
            return
        value = metrics.get(self._config.metric, math.nan)
        sign = 1 if self._config.mode == "max" else -1
        if not sign * value >= sign * self._config.value:
            return
        epoch = self._recipe.epoch(step)
        self.reached = {"step": step, "epoch": epoch, "value": value, **self._start.clock.times()}
        self._start.records.write(step, "target", self.reached)
        if not self.end_reason:
            self._tell(self.summary())

    def summary(self) -> str:
        """Returns whether and when the target was reached; '' where there is none."""
        config, reached = self._config, self.reached
        if not config.metric:
            return ""
        bound = "least" if config.mode == "max" else "most"
        line = f"target, {config.metric} of at {bound} {config.value:.6g}: "
        if reached is None:
            return line + "not reached"
        starts = f", in {reached['starts']} starts" if reached["starts"] > 1 else ""
        return (
            f"{line}reached at update {reached['step']} (epoch {reached['epoch']:.4g}) with "
            f"{reached['value']:.6g}, after {reached['seconds']:.1f} s of training and evaluation, "
            f"{reached['seconds_with_startup']:.1f} s with start-up and compiling{starts}"
        )

    def state(self) -> dict[str, Any] | None:
        """Returns the evaluation that reached it; None before."""
        return self.reached

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from a `state`."""
        self.reached = None if state is None else dict(state)
