"""Runs that differ only in their seeds, side by side in one process: `config.seeds`.

Each run has a separate loop, data order, records, checkpoints and guards. A loop is a generator
that yields a `Call` when it needs the devices. One program executes the calls of several loops
if the calls have equal keys. A run that ends early, for example because it diverged, does not
affect the other runs.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from lamb_tpu import limits
from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.errors import Preempted, UserError, out_of_range
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import compatibility
from lamb_tpu.run.combination import Combination
from lamb_tpu.run.holding import Shared
from lamb_tpu.run.updating import Constant, Updating
from lamb_tpu.spec import Spec
from lamb_tpu.tasks import Sums

KEY = "config.seeds"
Metrics = dict[str, float]
Spared = TypeVar("Spared", bound=UserError)


class Call(NamedTuple):
    """A loop's request for the updates that follow `step` completed updates.

    Attributes:
      updates: number of updates to make; 0: only compile the programs of the next update.
      state: the state after `step` updates; None if `updates` is 0.
    """

    updating: Updating
    step: int
    updates: int
    state: TrainState | None

    @property
    def key(self) -> tuple[int, int, Hashable]:
        """Step, number of updates and stage; calls with equal keys share a program."""
        return self.step, self.updates, self.constant.stage(self.step)

    @property
    def constant(self) -> Constant:
        """The programs of the run, whose batch size is constant."""
        assert self.updating.constant is not None  # `split` rejects a changing batch size
        return self.updating.constant


Answer = tuple[TrainState, Sums] | None
# The loop of a run: it yields calls, receives the new state and sums, and returns the metrics of
# its last evaluation.
Loop = Generator[Call, Answer, Metrics]


@dataclasses.dataclass
class Group:
    """Objects that the runs of a process share.

    Attributes:
      preemption: the signal handler of all runs.
      runs: number of runs.
      progress: `watch.progress.RunProgress` of the first run, whose progress bar serves all runs;
        None before it exists.
      shared: the training set on the devices.
    """

    preemption: Preemption
    runs: int
    progress: Any = None
    shared: Shared = dataclasses.field(default_factory=Shared)


def parse(text: str) -> list[int]:
    """Returns the seeds of `config.seeds`.

    >>> parse("0:5"), parse("3, 7")
    ([0, 1, 2, 3, 4], [3, 7])
    """
    if range_ := re.fullmatch(r"\s*(\d{1,10})\s*:\s*(\d{1,10})\s*", text):
        first, end = map(int, range_.groups())
        # Expand only as much of the range as is needed to reject it: it may be huge.
        seeds = list(range(first, min(end, first + limits.MAX_TOGETHER + 1)))
    elif re.fullmatch(r"\s*\d{1,10}\s*(,\s*\d{1,10}\s*)*", text):
        seeds = [int(part) for part in text.split(",")]
    else:
        seeds = []
    if not seeds or len(seeds) > limits.MAX_TOGETHER or len(set(seeds)) < len(seeds):
        problem = f"is not a list of 1 to {limits.MAX_TOGETHER} different seeds"
        remedy = (
            "use FIRST:END, such as '0:5' for the five seeds 0 to 4, or a list such as '0, 3, 7'"
        )
        raise UserError(KEY, text, problem, remedy)
    if max(seeds) > limits.MAX_SEED:
        raise out_of_range(KEY, text, f"seeds of at most {limits.MAX_SEED}")
    return seeds


def split(spec: Spec) -> list[Spec]:
    """Returns one config per seed, the same as for a separate run with that seed."""
    seeds = parse(spec.seeds)
    compatibility.check(Combination(spec), "seeds")
    return [dataclasses.replace(spec, seed=seed, seeds="") for seed in seeds]


def reason_against(spec: Spec) -> UserError | None:
    """Returns the error that explains why runs cannot share a program; None if they can."""
    return compatibility.rejection(Combination(spec), "seeds")


def alone(loop: Loop) -> Metrics:
    """Runs a single loop to its end; returns its metrics."""
    answer: Callable[[], Call] = functools.partial(next, loop)
    while True:
        try:
            call = answer()
        except StopIteration as end:
            return end.value
        try:
            assert call.state is not None  # a single run never yields a call that only compiles
            made = call.updating(call.state, call.step, call.updates)
            answer = functools.partial(loop.send, made)
        except BaseException as error:
            answer = functools.partial(loop.throw, error)


def run(loops: Sequence[Loop], spared: type[Spared]) -> list[Metrics | Spared]:
    """Runs several loops to their ends.

    Returns the metrics of each run, or the error of type `spared` that ended only that run. Any other
    error ends all runs. After a signal, raises `Preempted` once each run has saved its state.
    """
    results: dict[int, Metrics | Spared] = {}
    waiting: dict[int, Call] = {}
    notices: list[Preempted] = []

    def go_on(index: int, answer: Callable[[], Call]) -> None:
        waiting.pop(index, None)
        try:
            waiting[index] = answer()
        except StopIteration as end:
            results[index] = end.value
        except spared as error:
            results[index] = error
        except Preempted as notice:
            notices.append(notice)

    # If one loop raises an error, the other loops are still open. Close them, the last loop first.
    with contextlib.ExitStack() as stack:
        for loop in loops:
            stack.callback(loop.close)
        for index, loop in enumerate(loops):
            go_on(index, functools.partial(next, loop))
        while waiting:
            if notices:
                # These loops polled before the signal arrived. Raise the notice in them too.
                for index in sorted(waiting):
                    go_on(index, functools.partial(loops[index].throw, type(notices[0])()))
                continue
            least = min((call.step, call.updates) for call in waiting.values())
            first = next(call for call in waiting.values() if (call.step, call.updates) == least)
            due = [index for index in sorted(waiting) if waiting[index].key == first.key]
            answers = _make([waiting[index] for index in due])
            for index, answer in zip(due, answers, strict=True):
                go_on(index, functools.partial(loops[index].send, answer))
    if notices:
        raise notices[0]
    return [results[index] for index in range(len(loops))]


def _make(due: Sequence[Call]) -> Sequence[Answer]:
    """Executes several calls with equal keys as one program; returns the new states and sums."""
    first, runs = due[0], len(due)
    if not first.updates:
        first.constant.compile(first.step, runs)
        return [None] * runs
    if runs == 1:
        assert first.state is not None
        return [first.updating(first.state, first.step, first.updates)]
    states: Any = tuple(call.state for call in due)
    given = tuple(
        call.constant.take(state, call.step, call.updates)
        for call, state in zip(due, states, strict=True)
    )
    program = first.constant.program(first.step, False, first.updates, runs)
    return list(zip(*program(states, given, *first.constant.held), strict=True))
