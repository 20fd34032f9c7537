"""Time to a target: the first evaluation that reaches it, and the time until then.

MLPerf compares training runs by this time; `watch.clock` describes the times of a run. MLPerf's
clock may not be paused, so only runs that were never resumed are comparable with MLPerf's results.

A resumed run must have the same metric, value and mode. Otherwise, an evaluation before the
checkpoint could already have reached the new target, at an unknown time. `stop` may change, because
it does not affect the results: with `config.target.stop=False`, a run that has stopped at its
target continues.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lamb_tpu import spec_keys
from lamb_tpu.errors import unknown
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.watch.observer import Observer, Start


class Target(Observer):
    """Records the first evaluation that reaches the target.

    Attributes:
      reached: a dict of `step`, `epoch`, the metric's `value`, and `Clock.times` at the evaluation
        that reached the target; None before the target is reached.
    """

    name = "target"

    def __init__(
        self, wanted: spec_keys.Target, current: CurrentRecipe, report: Callable[[str], None]
    ) -> None:
        self._wanted, self._current, self._report = wanted, current, report
        self.may_end_run = bool(wanted.metric) and wanted.stop
        self.reached: dict[str, float] | None = None

    def check(self, names: Collection[str]) -> None:
        """Rejects a metric that is not among the evaluation's metrics, `names`."""
        metric = self._wanted.metric
        if metric and metric not in names:
            raise unknown("config.target.metric", metric, sorted(names))

    @property
    def end_reason(self) -> str:
        return "stopped at its target" if self.may_end_run and self.reached is not None else ""

    def started(self, start: Start) -> None:
        self._start = start
        # A power failure may have truncated the record.
        if self.reached is not None and start.records.missing.get("target"):
            start.records.write(int(self.reached["step"]), "target", self.reached)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the first evaluation that reaches the target; NaN and infinity never do."""
        if not self._wanted.metric or self.reached is not None:
            return
        value = metrics.get(self._wanted.metric, math.nan)
        sign = 1 if self._wanted.mode == "max" else -1
        if not math.isfinite(value) or sign * value < sign * self._wanted.value:
            return
        epoch = self._current.value.epoch(step)
        self.reached = {"step": step, "epoch": epoch, "value": value, **self._start.clock.times()}
        self._start.records.write(step, "target", self.reached)
        # A run that ends at its target prints the summary in its last line.
        if not self.end_reason:
            self._report(self.summary())

    def summary(self) -> str:
        """Describes whether and when the target was reached; '' without a target."""
        wanted, reached = self._wanted, self.reached
        if not wanted.metric:
            return ""
        bound = "least" if wanted.mode == "max" else "most"
        line = f"target, {wanted.metric} of at {bound} {wanted.value:.6g}: "
        if reached is None:
            return line + "not reached"
        starts = f", in {reached['starts']} starts" if reached["starts"] > 1 else ""
        return (
            f"{line}reached at update {reached['step']} (epoch {reached['epoch']:.4g}) with "
            f"{reached['value']:.6g}, after {reached['seconds']:.1f} s of training and evaluation, "
            f"{reached['seconds_with_startup']:.1f} s with start-up and compiling{starts}"
        )

    def state(self) -> dict[str, Any] | None:
        return self.reached

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self.reached = None if state is None else dict(state)
