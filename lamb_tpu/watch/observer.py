"""Base class of observers, which follow a run without taking part in its training.

The loop calls the hooks below and does not know which observers there are; `watch.observers` lists
them. An observer overrides the hooks that it needs. Each is one file with a test of its own.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from lamb_tpu.errors import UserError
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.watch.clock import Clock

# Metrics of one update or batch, as sums and weights on the host.
Sums = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of a run: everything is compiled, and the first update is about to begin.

    Attributes:
      step: completed updates.
      state: the train state.
      is_over: whether the run is already complete, so that nothing will be trained.
      eval_due: whether the evaluation of this update is still to come.
      clock: the run's clock.
      records: the writer of metrics.jsonl.
      last_checkpoint: returns the path of the newest complete checkpoint, for messages.
      fail: ends the run with a UserError, at the next update and in every process.
    """

    step: int
    state: TrainState
    is_over: bool
    eval_due: bool
    clock: Clock
    records: MetricsWriter
    last_checkpoint: Callable[[], str]
    fail: Callable[[UserError], None]


@dataclasses.dataclass
class Record:
    """A record of the updates since the last one, to which observers add.

    Attributes:
      step: completed updates.
      updates: number of updates that the record covers.
      state: the train state.
      values: metrics that are shown to the user and written.
      rates: further numbers that are only written.
    """

    step: int
    updates: int
    state: TrainState
    values: dict[str, float]
    rates: dict[str, float] = dataclasses.field(default_factory=dict)


class Observer:
    """Base class of all observers, whose hooks do nothing.

    Attributes:
      name: key of the observer's state in a checkpoint; '' for an observer without state.
      saves_evaluations: whether every update that is evaluated must be saved.
      may_end_run: whether an evaluation may end the run, see `end_reason`.
    """

    name: ClassVar[str] = ""
    saves_evaluations: bool = False
    may_end_run: bool = False

    @property
    def end_reason(self) -> str:
        """Reason for ending the run early, such as 'stopped at its target'; '' while it goes on."""
        return ""

    def check(self, names: Collection[str]) -> None:
        """Refuses a config that names an unknown metric; `names` are the evaluation's metrics."""

    def started(self, start: Start) -> None:
        """Called once, before the first update of a start."""

    def updating(self, step: int) -> None:
        """Called before each update, after `step` completed updates."""

    def updated(self, step: int, state: TrainState) -> None:
        """Called after each update is started; the devices may still be computing it.

        Only the first update of a start is complete at this time.
        """

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Called with the metrics of updates, in order, when they are on the host."""

    def saving(self, step: int, state: TrainState) -> None:
        """Called before a state is saved, or evaluated and then perhaps saved.

        May raise a UserError.
        """

    def recorded(self, record: Record) -> None:
        """Called for every record; may add to it."""

    def paused(self, step: int, reason: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context that is entered during an interruption: 'evaluation' or 'save'."""
        return contextlib.nullcontext()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of each evaluation."""

    def completed(self, step: int) -> None:
        """Called when the run is complete."""

    def preempted(self, step: int) -> None:
        """Called when a signal ended the start and everything is saved."""

    def ended(self) -> None:
        """Called last, however the start ended."""

    def summary(self) -> str:
        """Returns the observer's part of the line that ends a run; '' for none."""
        return ""

    def keeps(self, step: int) -> bool:
        """Returns whether to keep the checkpoint of an update, however old it is."""
        return False

    def state(self) -> Any:
        """Returns the observer's state for `restore`, as JSON values."""
        return None

    def restore(self, state: Any) -> None:
        """Continues from a `state`."""


class Observers:
    """Calls the hooks of several observers, in their order.

    Args:
      observers: the observers of one run.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = list(observers)
        # Only overridden hooks are called, so that unused ones cost no time between updates.
        self._updating = [each for each in self._all if _overrides(each, "updating")]
        self._updated = [each for each in self._all if _overrides(each, "updated")]
        self._ending = [each for each in self._all if _overrides(each, "end_reason")]

    def check(self, names: Collection[str]) -> None:
        for observer in self._all:
            observer.check(names)

    @contextlib.contextmanager
    def watching(self, start: Start) -> Iterator[None]:
        """Calls `started` of each; at the end calls `ended`, in reverse, of those that started."""
        with contextlib.ExitStack() as stack:
            for observer in self._all:
                observer.started(start)
                stack.callback(observer.ended)
            yield

    def updating(self, step: int) -> None:
        for observer in self._updating:
            observer.updating(step)

    def updated(self, step: int, state: TrainState) -> None:
        for observer in self._updated:
            observer.updated(step, state)

    def fetched(self, updates: Sequence[tuple[int, Sums]]) -> None:
        for observer in self._all:
            observer.fetched(updates)

    def saving(self, step: int, state: TrainState) -> None:
        for observer in self._all:
            observer.saving(step, state)

    def recorded(self, record: Record) -> None:
        for observer in self._all:
            observer.recorded(record)

    @contextlib.contextmanager
    def paused(self, step: int, reason: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._all:
                stack.enter_context(observer.paused(step, reason))
            yield

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for observer in self._all:
            observer.evaluated(step, metrics)

    def completed(self, step: int) -> None:
        for observer in self._all:
            observer.completed(step)

    def preempted(self, step: int) -> None:
        for observer in self._all:
            observer.preempted(step)

    def summary(self) -> str:
        return "; ".join(filter(None, (observer.summary() for observer in self._all)))

    def keep(self, step: int) -> bool:
        return any(observer.keeps(step) for observer in self._all)

    @property
    def saves_evaluations(self) -> bool:
        return any(observer.saves_evaluations for observer in self._all)

    @property
    def may_end_run(self) -> bool:
        return any(observer.may_end_run for observer in self._all)

    @property
    def end_reason(self) -> str:
        return next(filter(None, (observer.end_reason for observer in self._ending)), "")

    def state(self) -> dict[str, Any]:
        return {observer.name: observer.state() for observer in self._all if observer.name}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restores observers from their states; an observer without a saved state starts anew."""
        for observer in self._all:
            if observer.name in states:
                observer.restore(states[observer.name])


def _overrides(observer: Observer, hook: str) -> bool:
    return getattr(type(observer), hook) is not getattr(Observer, hook)
