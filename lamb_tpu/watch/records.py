"""Writes the records of training and evaluation to metrics.jsonl."""

from collections.abc import Mapping

from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.watch.observer import Observer, Record, Start


class Records(Observer):
    """Writes records, including the values that earlier observers have added."""

    def __init__(self, current: CurrentRecipe) -> None:
        self._current = current

    def started(self, start: Start) -> None:
        self._start = start

    def recorded(self, record: Record) -> None:
        recipe = self._current.value
        counts = {
            "epoch": recipe.epoch(record.step),
            "updates": record.updates,
            "seconds": self._start.clock.seconds,
        }
        if recipe.path is not None:
            counts |= {
                "batch_size": recipe.batch(record.step - 1),  # of the newest update
                "examples": recipe.examples(record.step),
            }
        self._start.records.write(record.step, "train", record.values | counts | record.rates)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._start.records.write(
            step, "eval", {**metrics, "epoch": self._current.value.epoch(step)}
        )

    def completed(self, step: int) -> None:
        """Closes the file before the run ends, so that a full disk is reported."""
        self._start.records.close()

    def ended(self) -> None:
        self._start.records.close()
