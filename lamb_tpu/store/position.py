"""The position of a run: the part of a checkpoint that is JSON, not arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Position:
    """The progress of a run besides its train state, as JSON values.

    Attributes:
      loader: the data position, see `TrainLoader.state`.
      observers: states of the observers by name, see `watch.observer.Observer.state`.
      unlogged: metrics of the updates since the last record, as sums and weights.
      eval_due: whether this update must still be evaluated, for example after an interruption.
      seconds: total time of training, evaluation and saving so far, in seconds.
      startup: total time from each start or resumption to the first update after it, in seconds.
      starts: how often the run has been started or resumed so far.
      total_steps: updates of the complete run, as known at this update; None in older checkpoints.
      records: number of records in metrics.jsonl, by kind; empty in older checkpoints.
      end_reason: why the run ends early at this update, such as 'stopped at its target'.
    """

    loader: Mapping[str, Any] | None = None
    observers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unlogged: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    eval_due: bool = False
    seconds: float = 0.0
    startup: float = 0.0
    starts: int = 0
    total_steps: int | None = None
    records: Mapping[str, int] = dataclasses.field(default_factory=dict)
    end_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns a flat dict with the observers' states under their names."""
        # `dataclasses.asdict` would deep-copy the observers' states.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields.pop("observers"), **fields}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Position":
        """Returns the position that `to_json` wrote; missing keys get their defaults."""
        # Any other key is the name of an observer, even if this run does not have it.
        fields = {field.name for field in dataclasses.fields(cls)} - {"observers"}
        observers = {name: value for name, value in saved.items() if name not in fields}
        return cls(observers=observers, **{name: saved[name] for name in fields if name in saved})
