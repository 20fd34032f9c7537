"""Records of training and evaluation in metrics.jsonl."""

from collections.abc import Mapping

from lamb_tpu.run.recipe import Recipe
from lamb_tpu.watch.observer import Observer, Record, Start


class Records(Observer):
    """Writes records, with everything that the observers before it have added.

    Args:
      recipe: the run's recipe, for epochs and learning rates.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def started(self, start: Start) -> None:
        self._start = start

    def recorded(self, record: Record) -> None:
        counts = {
            "epoch": self._recipe.epoch(record.step),
            "updates": record.updates,
            "seconds": self._start.clock.seconds,
        }
        if self._recipe.path is not None:
            counts |= {
                "batch_size": self._recipe.batch(record.step - 1),  # of the newest update
                "examples": self._recipe.examples(record.step),
            }
        self._start.records.write(record.step, "train", record.values | counts | record.rates)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._start.records.write(step, "eval", {**metrics, "epoch": self._recipe.epoch(step)})

    def completed(self, step: int) -> None:
        """Flushes what is still in memory, so that a full disk is reported."""
        self._start.records.close()

    def ended(self) -> None:
        self._start.records.close()
