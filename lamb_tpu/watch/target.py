"""Time to a target: the first evaluation that reaches it, and the time until then.

MLPerf compares training runs by their time to a target. `config.target` names a metric of the
evaluation and its value. `seconds` begins with the first update and covers training, evaluation and
saving. `seconds_with_startup` adds the time before: reading data, initial weights or the
checkpoint, and compiling. Both add up over the starts of a run; `starts` is their number. Neither
includes the time between two starts, or the time of updates that were lost because a start was
killed. (MLPerf's own clock may not be paused, so only the time of a single start can be compared
with its results.)

A resumed run must have the same metric, value and mode: the first evaluation to reach another
target may lie before the checkpoint, and its time would be unknown. `stop` may change, because it
changes no number: a run that has ended at its target goes on with `config.target.stop=False`.
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
      recipe: the run's recipe, for epochs.
      tell: prints a line.

    Attributes:
      reached: `step` (completed updates), `epoch`, `value` of the metric, and the time until then:
        `seconds`, `seconds_with_startup`, `starts`. None before the target is reached.
    """

    name = "target"

    def __init__(self, config: ConfigDict, recipe: Recipe, tell: Callable[[str], None]) -> None:
        self._config, self._recipe, self._tell = config, recipe, tell
        self.may_end_run = bool(config.metric) and config.stop
        self.reached: dict[str, float] | None = None

    def check(self, names: Collection[str]) -> None:
        """Refuses a metric that is not among the evaluation's metrics, `names`."""
        metric = self._config.metric
        if metric and metric not in names:
            raise UserError(
                f"config.target.metric is {metric!r}; the evaluation's metrics are: "
                f"{', '.join(sorted(names))}"
            )

    @property
    def end_reason(self) -> str:
        """'stopped at its target' after an evaluation reached it, if `config.target.stop`."""
        return "stopped at its target" if self.may_end_run and self.reached is not None else ""

    def started(self, start: Start) -> None:
        self._start = start

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the first evaluation that reaches the target; NaN or infinity never does."""
        if not self._config.metric or self.reached is not None:
            return
        value = metrics.get(self._config.metric, math.nan)
        sign = 1 if self._config.mode == "max" else -1
        if not math.isfinite(value) or sign * value < sign * self._config.value:
            return
        epoch = self._recipe.epoch(step)
        self.reached = {"step": step, "epoch": epoch, "value": value, **self._start.clock.times()}
        self._start.records.write(step, "target", self.reached)
        # A run that ends at its target prints the summary in its last line.
        if not self.end_reason:
            self._tell(self.summary())

    def summary(self) -> str:
        """Returns whether and when the target was reached; '' without a target."""
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
        """Returns the evaluation that reached the target; None before."""
        return self.reached

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continues from a `state`."""
        self.reached = None if state is None else dict(state)
