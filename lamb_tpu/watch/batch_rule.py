"""Decisions of the next batch from statistics of the updates: `config.batch_rule`."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lamb_tpu.batching import noise_scale
from lamb_tpu.batching.rules.noise_scale import NOISE_SCALE, NoiseScale
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.gradient_statistics import GRAD_SQ, TRACE
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.watch.observer import Observer, Start, Sums

# The unbiased pair of an update, which is averaged over updates before it is divided.
_PAIR = (GRAD_SQ, TRACE)


class BatchRule(Observer):
    """Decides the next batch of a rule that needs statistics, and keeps the path in checkpoints.

    A decision is taken when the update before it is fetched, so that the path of batches is known
    up to the next decision. The statistics are replicated: all processes decide alike. A statistic
    that says nothing, such as that of a skipped update, leaves the batch to the rule as NaN.

    Args:
      recipe: the run's recipe, whose path it changes.
    """

    name = "batches"

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._rule, self._path = recipe, recipe.rule, recipe.path
        self._averages, self._step = noise_scale.init(), 0

    def started(self, start: Start) -> None:
        self._step = start.step

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Adds the updates' statistics to the averages; decides where a decision is due.

        Raises:
          UserError: the updates have not the statistics that the rule needs.
        """
        for self._step, sums in updates:
            if isinstance(self._rule, NoiseScale) and all(name in sums for name in _PAIR):
                pair = noise_scale.Estimate(*(_mean(*sums[name]) for name in _PAIR))
                self._averages = noise_scale.update(self._averages, pair, self._rule.decay)
            if self._recipe.is_decision_due(self._step):
                self._decide(self._step, sums)

    def _decide(self, step: int, sums: Sums) -> None:
        assert self._rule is not None and self._path is not None  # a constant batch decides nothing
        examples = self._path.examples(step)
        if examples == self._path.total:
            return
        found = {name: _mean(*sums[name]) for name in sums}
        if all(name in sums for name in _PAIR):
            found[NOISE_SCALE] = float(noise_scale.noise_scale(self._averages))
        try:
            batch = self._rule.next_batch(self._path.batch(step - 1), found, examples)
        except ValueError as error:
            raise UserError(f"config.batch_rule, after update {step}: {error}") from error
        self._path.change(step, batch)

    def state(self) -> dict[str, Any] | None:
        """Returns the path so far and the averages; None for a batch that does not change."""
        if self._path is None:
            return None
        return {
            "step": self._step,
            "pieces": self._path.until(self._step),
            "averages": [float(value) for value in self._averages],
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continues the path of a checkpoint.

        Raises:
          UserError: the rule needs no statistics, and now gives another path.
        """
        if self._path is not None and state is not None and self._recipe.decides:
            self._path.restore(state["pieces"])
            self._averages = noise_scale.NoiseScaleState(*state["averages"])
            return
        step, saved = (state["step"], state["pieces"]) if state else (0, None)
        here = None if self._path is None else self._path.until(step)
        if here != saved:
            raise UserError(
                f"config.batch_rule gives batches (first update, size) {here} up to update {step}, "
                f"and the checkpoint was trained with {saved}; go on with the version of lamb_tpu "
                "that began the run, or begin in a new --workdir"
            )


def _mean(total: float, weight: float) -> float:
    """Returns total / weight; NaN for the weight 0 of an update that was skipped."""
    return float(total) / float(weight) if weight else math.nan
