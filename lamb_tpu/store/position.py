"""The position of a run: the part of a checkpoint that is not arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Position:
    """Progress of a run beside its train state, as JSON values.

    Attributes:
      loader: the data position, see `TrainLoader.state`.
      observers: states of the observers by their names, see `watch.observer.Observer.state`.
      unlogged: metrics of the updates since the last record, as sums and weights.
      eval_due: whether the evaluation of this update is still to be done, or was interrupted.
      seconds: time of training, evaluation and saving, over all starts.
      startup: time before the first update of each start, in seconds, over all starts.
      starts: number of starts of the run.
      total_steps: updates of the full run, by what is known at this update; None in checkpoints of
        older versions.
      end_reason: why the run ends at this update before its last one, such as 'stopped at its
        target'; '' if it does not.
    """

    loader: Mapping[str, Any] | None = None
    observers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unlogged: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    eval_due: bool = False
    seconds: float = 0.0
    startup: float = 0.0
    starts: int = 0
    total_steps: int | None = None
    end_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns one flat dict, with the observers' states under their names."""
        # Not `dataclasses.asdict`, which would copy the observers' states in depth.
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own.pop("observers"), **own}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Position":
        """Returns the position that `to_json` wrote; missing keys get their defaults."""
        # Any other key is the name of an observer, also of one that this run does not have.
        own = {field.name for field in dataclasses.fields(cls)} - {"observers"}
        observers = {name: value for name, value in saved.items() if name not in own}
        return cls(observers=observers, **{name: saved[name] for name in own if name in saved})
