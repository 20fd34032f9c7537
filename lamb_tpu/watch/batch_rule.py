"""Chooses the next batch size from statistics of the updates (`config.batch_rule`)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lamb_tpu.batching.path import Path
from lamb_tpu.batching.rules.base import State
from lamb_tpu.errors import UserError
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.watch.observer import Observer, Start, Sums


class BatchRule(Observer):
    """Chooses batch sizes with a rule that needs statistics, and saves the sizes in checkpoints.

    The statistics are replicated, so all processes make the same decision. A missing statistic, such
    as in a skipped update, reaches the rule as NaN. Each decision replaces the recipe in `current`.
    """

    name = "batches"

    def __init__(self, current: CurrentRecipe) -> None:
        self._current, self._rule = current, current.value.rule
        self._state: State = () if self._rule is None else self._rule.init()
        self._step = 0

    @property
    def _path(self) -> Path | None:
        return self._current.value.path

    def started(self, start: Start) -> None:
        self._step = start.step

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Updates the rule's state with the statistics, and the batch size if a decision is due."""
        for self._step, sums in updates:
            if self._rule is None:
                continue
            # A skipped update has weight 0.
            means = {
                name: float(total) / float(weight) if weight else math.nan
                for name, (total, weight) in sums.items()
            }
            self._state, statistics = self._rule.update(self._state, means)
            if self._current.value.is_decision_due(self._step):
                self._decide(self._step, statistics)

    def _decide(self, step: int, statistics: Mapping[str, float]) -> None:
        path = self._path
        assert self._rule is not None and path is not None  # both exist if a decision is due
        examples = path.examples(step)
        if examples == path.total:
            return
        try:
            batch = self._rule.decide(path.batch(step - 1), statistics, examples)
        except ValueError as error:
            problem = f"failed after update {step}: {error}"
            raise UserError("config.batch_rule", ..., problem, "correct the rule") from error
        self._current.follow(path.change(step, batch))

    def state(self) -> dict[str, Any] | None:
        if self._path is None:
            return None
        return {
            "step": self._step,
            "pieces": self._path.until(self._step),
            "averages": [float(value) for value in self._state],
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continues the saved path of batch sizes; a rule without statistics must give the same path."""
        if self._path is not None and state is not None and self._current.value.decides:
            path = Path.from_segments(state["pieces"], self._path.total)
            self._current.follow(path)
            self._state = tuple(state["averages"])
            return
        step, saved = (state["step"], state["pieces"]) if state else (0, None)
        current = None if self._path is None else self._path.until(step)
        if current != saved:
            raise UserError(
                "config.batch_rule",
                ...,
                f"gives batch sizes (first update, size) {current} up to update {step}, but the "
                f"checkpoint has {saved}",
                "resume with the version of lamb_tpu that began the run, or use a new --workdir",
            )
