"""The update whose evaluation was the best so far."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from lamb_tpu.errors import UserError
from lamb_tpu.watch.observer import Observer


class Best(Observer):
    """Remembers the best evaluation by one metric, the first of equal ones; keeps its checkpoint.

    Args:
      metric: name of the evaluation's metric; '' remembers nothing.
      mode: 'max' or 'min': whether larger or smaller values are better.

    Attributes:
      step: completed updates at the best evaluation; None before the first.
      value: the metric at the best evaluation.
    """

    name = "best"

    def __init__(self, metric: str, mode: str = "max") -> None:
        self._metric, self._mode = metric, mode
        self.saves_evaluations = metric != ""
        self.step: int | None = None
        self.value = math.nan

    def check(self, names: Collection[str]) -> None:
        """Refuses a metric that is not among the evaluation's metrics, `names`."""
        if self._metric and self._metric not in names:
            raise UserError(
                f"config.checkpoint.best is {self._metric!r}; the evaluation's metrics are: "
                f"{', '.join(sorted(names))}"
            )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compares an evaluation with the best so far; one that is not finite never is the best."""
        value = metrics.get(self._metric, math.nan)
        if not self._metric or not math.isfinite(value):
            return
        sign = 1 if self._mode == "max" else -1
        if self.step is None or sign * value > sign * self.value:
            self.step, self.value = step, value

    def keeps(self, step: int) -> bool:
        """Keeps the checkpoint of the best evaluation."""
        return step == self.step

    def state(self) -> dict[str, Any]:
        """Returns the best so far, with its metric and mode."""
        return {
            "metric": self._metric,
            "mode": self._mode,
            "step": self.step,
            "value": None if self.step is None else self.value,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`; a state of another metric or mode is ignored."""
        # config.checkpoint.best may change between two starts of a run.
        if state["step"] is not None and [state["metric"], state["mode"]] == [
            self._metric,
            self._mode,
        ]:
            self.step, self.value = state["step"], state["value"]
