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
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.errors import UserError


class Target:
    """Remembers the first evaluation that reaches the target.

    Args:
      config: `config.target`.

    Attributes:
      reached: `step` (completed updates), `epoch`, `value` of the metric, and the time it took:
        `seconds`, `seconds_with_startup`, `starts`. None before.
    """

    def __init__(self, config: ConfigDict) -> None:
        self._config = config
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
    def may_end_run(self) -> bool:
        """Whether an evaluation can be the end of the run."""
        return bool(self._config.metric) and self._config.stop

    @property
    def ends_run(self) -> bool:
        """Whether one was."""
        return self.may_end_run and self.reached is not None

    def see(
        self, step: int, epoch: float, metrics: Mapping[str, float], time: Mapping[str, float]
    ) -> bool:
        """Takes in an evaluation; whether it is the first that reaches the target.

        Args:
          step: completed updates.
          epoch: the same in epochs.
          metrics: the evaluation's. What is no number reaches nothing.
          time: `seconds`, `seconds_with_startup` and `starts` up to now.
        """
        if not self._config.metric or self.reached is not None:
            return False
        value = metrics.get(self._config.metric, math.nan)
        sign = 1 if self._config.mode == "max" else -1
        if not sign * value >= sign * self._config.value:
            return False
        self.reached = {"step": step, "epoch": epoch, "value": value, **time}
        return True

    def describe(self) -> str:
        """One line for the terminal; '' where there is no target."""
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
        """What `restore` takes, as JSON values."""
        return self.reached

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continues from a `state`."""
        self.reached = None if state is None else dict(state)
