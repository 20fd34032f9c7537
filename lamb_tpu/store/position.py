"""The position of a run: what a checkpoint holds beside the arrays of the state."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands, apart from its train state; JSON values only.

    Attributes:
      loader: the data position, see `TrainLoader.state`.
      observers: states of the observers by their names, see `watch.observer.Observer.state`.
      unlogged: metrics of the updates since the last record, as sums and weights.
      eval_due: an evaluation of this update was broken off, or not yet begun.
      seconds: of training, evaluation and saving, over all starts.
      startup: seconds before the first update of each start, over all starts.
      starts: how many there were.
    """

    loader: Mapping[str, Any] | None = None
    observers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unlogged: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    eval_due: bool = False
    seconds: float = 0.0
    startup: float = 0.0
    starts: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns one flat dict, in which the observers' states stand under their own names."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own.pop("observers"), **own}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Position":
        """Returns what `to_json` has written; keys that it lacks keep their defaults."""
        own = {field.name for field in dataclasses.fields(cls)} - {"observers"}
        observers = {name: value for name, value in saved.items() if name not in own}
        return cls(observers=observers, **{name: saved[name] for name in own if name in saved})
