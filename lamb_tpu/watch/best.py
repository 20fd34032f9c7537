"""The update with the best evaluation so far."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from lamb_tpu.errors import unknown
from lamb_tpu.watch.observer import Observer


class Best(Observer):
    """Tracks which evaluation is the best by one metric, and keeps the checkpoint of that update.

    Of equal evaluations, the first counts as the best. The metric '' disables the observer.

    Attributes:
      step: completed updates at the best evaluation; None before the first evaluation.
      value: the metric at the best evaluation.
    """

    name = "best"

    def __init__(self, metric: str, mode: str = "max") -> None:
        self._metric, self._mode = metric, mode
        self.saves_evaluations = metric != ""
        self.step: int | None = None
        self.value = math.nan

    def check(self, names: Collection[str]) -> None:
        """Rejects a metric that is not among the evaluation's metrics, `names`."""
        if self._metric and self._metric not in names:
            raise unknown("config.checkpoint.best", self._metric, sorted(names))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compares an evaluation with the best so far; NaN and infinity never count."""
        value = metrics.get(self._metric, math.nan)
        if not self._metric or not math.isfinite(value):
            return
        sign = 1 if self._mode == "max" else -1
        if self.step is None or sign * value > sign * self.value:
            self.step, self.value = step, value

    def keeps(self, step: int) -> bool:
        return step == self.step

    def state(self) -> dict[str, Any]:
        return {
            "metric": self._metric,
            "mode": self._mode,
            "step": self.step,
            "value": None if self.step is None else self.value,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        # config.checkpoint.best may change between starts of a run.
        same = (state["metric"], state["mode"]) == (self._metric, self._mode)
        if same and state["step"] is not None:
            self.step, self.value = state["step"], state["value"]
