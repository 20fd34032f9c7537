"""Base class of observers, which follow a run from outside the training loop.

The training loop calls the hooks below, and does not know the observers; `watch.observers` lists
them. An observer overrides the hooks that it needs. Each observer is one file with one test.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec

from lamb_tpu.errors import UserError
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.watch.clock import Clock

# Metrics of one update or batch, as sums and weights on the host.
Sums = Mapping[str, tuple[float, float]]
_P = ParamSpec("_P")


@dataclasses.dataclass(frozen=True)
class Start:
    """The start or resumption of a run: everything is compiled, and the next update is about to begin.

    Attributes:
      step: completed updates.
      is_over: whether the run is already complete, so that nothing will be trained.
      eval_due: whether the evaluation after `step` updates is still to be done.
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
    """A record of the updates since the previous record; observers add values to it.

    Attributes:
      step: completed updates.
      updates: number of updates that the record covers.
      values: metrics that are shown to the user and written.
      rates: further values that are only written.
    """

    step: int
    updates: int
    state: TrainState
    values: dict[str, float]
    rates: dict[str, float] = dataclasses.field(default_factory=dict)


class Observer:
    """Base class of all observers; its hooks do nothing.

    Attributes:
      name: key of the observer's state in a checkpoint; '' for an observer without state.
      saves_evaluations: whether the train state must be saved after every evaluation.
      may_end_run: whether an evaluation may end the run, see `end_reason`.
    """

    name: ClassVar[str] = ""
    saves_evaluations: bool = False
    may_end_run: bool = False

    @property
    def end_reason(self) -> str:
        """Reason for ending the run early, such as 'stopped at its target'; '' to continue."""
        return ""

    def check(self, names: Collection[str]) -> None:
        """Rejects a config that names an unknown metric; `names` are the evaluation's metrics."""

    def started(self, start: Start) -> None:
        """Called once when the run starts or resumes, before the first update."""

    def ends_call(self, step: int) -> bool:
        """Returns whether `updated` must be called after update `step`, counted from 1.

        One call of the compiled step may make several updates; if True, the call ends at this update.
        """
        return False

    def updating(self, step: int) -> None:
        """Called before each call of the compiled step, after `step` completed updates."""

    def updated(self, step: int, state: TrainState) -> None:
        """Called when a call of the compiled step has been dispatched; `step` is its last update.

        The devices may still be computing. Only the first update after a start or resumption, which
        has a separate call, is complete at this time.
        """

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Called with the metrics of updates, in order, once they are on the host."""

    def saving(self, step: int, state: TrainState) -> None:
        """Called before a state is saved or evaluated; may raise a UserError to prevent this."""

    def recorded(self, record: Record) -> None:
        """Called for every record; may add values."""

    def paused(self, step: int, reason: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context that is entered during an interruption: 'evaluation' or 'save'."""
        return contextlib.nullcontext()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of each evaluation."""

    def completed(self, step: int) -> None:
        """Called when the run is complete."""

    def preempted(self, step: int) -> None:
        """Called after a signal has ended the run and everything is saved."""

    def ended(self) -> None:
        """Called last, whether the run is complete, was preempted or failed."""

    def summary(self) -> str:
        """Returns the observer's text for the last line of a run; '' for none."""
        return ""

    def keeps(self, step: int) -> bool:
        """Returns whether to keep the checkpoint of an update even when it is old."""
        return False

    def state(self) -> Any:
        """Returns the observer's state for `restore`, as JSON values."""
        return None

    def restore(self, state: Any) -> None:
        """Continues from a value that `state` returned."""


def _each(
    hook: Callable[Concatenate[Observer, _P], None],
) -> Callable[Concatenate["Observers", _P], None]:
    """Makes a method that calls a hook of every observer, in the order of the observers."""

    def call(self: "Observers", *args: _P.args, **kwargs: _P.kwargs) -> None:
        for overridden in self._hooks[hook.__name__]:
            overridden(*args, **kwargs)

    return call


class Observers:
    """Calls the hooks of a run's observers, in the order of `observers`."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = list(observers)
        # Only overridden hooks are called, to save time between updates.
        self._hooks: dict[str, list[Callable[..., Any]]] = {
            name: [
                getattr(each, name) for each in self._all if getattr(type(each), name) is not hook
            ]
            for name, hook in vars(Observer).items()
            if callable(hook)
        }

    check = _each(Observer.check)
    updating = _each(Observer.updating)
    updated = _each(Observer.updated)
    fetched = _each(Observer.fetched)
    saving = _each(Observer.saving)
    recorded = _each(Observer.recorded)
    evaluated = _each(Observer.evaluated)
    completed = _each(Observer.completed)
    preempted = _each(Observer.preempted)

    @contextlib.contextmanager
    def watching(self, start: Start) -> Iterator[None]:
        """Calls `started` on each observer; on exit, calls `ended` on these observers in reverse order."""
        with contextlib.ExitStack() as stack:
            for observer in self._all:
                observer.started(start)
                stack.callback(observer.ended)
            yield

    @contextlib.contextmanager
    def paused(self, step: int, reason: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._all:
                stack.enter_context(observer.paused(step, reason))
            yield

    def ends_call(self, step: int) -> bool:
        return any(ends_call(step) for ends_call in self._hooks["ends_call"])

    def keep(self, step: int) -> bool:
        return any(observer.keeps(step) for observer in self._all)

    def summary(self) -> str:
        return "; ".join(filter(None, (observer.summary() for observer in self._all)))

    @property
    def saves_evaluations(self) -> bool:
        return any(observer.saves_evaluations for observer in self._all)

    @property
    def may_end_run(self) -> bool:
        return any(observer.may_end_run for observer in self._all)

    @property
    def end_reason(self) -> str:
        return next(filter(None, (observer.end_reason for observer in self._all)), "")

    def state(self) -> dict[str, Any]:
        return {observer.name: observer.state() for observer in self._all if observer.name}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restores observers that have a saved state; the others start from scratch."""
        for observer in self._all:
            if observer.name in states:
                observer.restore(states[observer.name])
