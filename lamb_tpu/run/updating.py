"""The updates of a run, with examples from the run's data loader."""

import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lamb_tpu import data
from lamb_tpu.cost import traffic
from lamb_tpu.errors import UserError
from lamb_tpu.kernels.convolution import are_fast_in_loops
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.components import RESIDUAL
from lamb_tpu.parallel.microbatched import Microbatched
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.parallel.step import Stage
from lamb_tpu.run import batches, memory
from lamb_tpu.run.build import Run
from lamb_tpu.run.calls import KEY, Calls
from lamb_tpu.run.holding import Shared
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.run.statistics import statistics_of
from lamb_tpu.tasks import Sums

# `(updates, count, rows) -> batch`: `TrainLoader.take` for one update, otherwise `take_several`.
Take = Callable[[int, int, np.ndarray], data.Batch]


class Microbatches(Sequence[Mapping[str, jax.Array]]):
    """The microbatches of an update in host memory; indexing sends one to the devices.

    The devices hold only the microbatches in progress and those that the host has sent ahead. If a
    task's loss weights depend on the examples, each microbatch is used twice.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[], data.Batch],
        send: Callable[[data.Batch], Mapping[str, jax.Array]],
    ) -> None:
        self._count, self._read, self._send = count, read, send
        self._cache: list[data.Batch] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)
        while len(self._cache) <= index:
            self._cache.append(self._read())
        return self._send(self._cache[index])


class NextExchange:
    """The exchange of a run's next update, which may depend on the state."""

    def __init__(self, run: Run) -> None:
        self._run, self._began = run, False
        self.current = run.exchange

    def choose(self, state: TrainState, step: int) -> None:
        """Chooses the exchange of the update after `step` updates, see `Exchange.chosen`."""
        if self.current is None or not (self.current.exchange.due(step) or not self._began):
            return
        self._began = True
        if RESIDUAL in state.parts:
            residual = state.parts[RESIDUAL]["kept"]
            self.current = self.current.chosen(self._run.abstract_state.params, residual)


@dataclasses.dataclass(frozen=True)
class Updating:
    """Makes `count` updates after `step` completed updates: `(state, step, count) -> (state, sums)`.

    Donates the buffers of the state. The sums of several updates have a leading axis (count,).

    Attributes:
      update: makes one update, `(state, step) -> (state, sums)`; `(state, step, count)` makes several.
      sent_bytes: returns the bytes that a device sent in the latest update, counted in the update's
        compiled programs; None under jit and on one device.
      count: returns the number of updates in the call after `step` updates.
      constant: the programs of a constant batch, also for several runs; None if the batch changes.
    """

    update: Callable[..., tuple[TrainState, Sums]]
    sent_bytes: Callable[[], int | None] = lambda: None
    count: Callable[[int], int] = lambda step: 1
    constant: "Constant | None" = None

    def __call__(self, state: TrainState, step: int, count: int = 1) -> tuple[TrainState, Sums]:
        return self.update(state, step) if count == 1 else self.update(state, step, count)


@dataclasses.dataclass
class Sent:
    """Counts the bytes that a device sent in the latest update, see `Updating.sent_bytes`.

    Attributes:
      stage: returns the stage of the update after `step` updates; all updates of a stage have the
        same programs.
      programs: returns the programs of the update after `step` updates.
      times: returns how often each program runs in the update after `step` updates.
      last: number of completed updates before the latest update.
    """

    run: Run
    stage: Callable[[int], Hashable]
    programs: Callable[[int], Sequence[jax.stages.Lowered | None]]
    times: Callable[[int], Sequence[int]]
    last: int = 0
    _each: dict[Hashable, list[int]] = dataclasses.field(default_factory=dict)

    def __call__(self) -> int | None:
        several = mesh_lib.num_batch_shards(self.run.mesh) > 1
        if self.run.spec.parallel.backend == "jit" or not several:
            return None
        stage = self.stage(self.last)
        if stage not in self._each:
            self._each[stage] = [_sent_by(program) for program in self.programs(self.last)]
        return sum(map(operator.mul, self.times(self.last), self._each[stage]))


class Constant:
    """The updates with a constant batch size.

    Has a program for each combination of stage, number of updates in a call, and number of runs.

    Attributes:
      held: arrays of the data set, if the devices hold it.
      updates: largest number of updates in a call.
      sent: see `Updating.sent_bytes`.
    """

    def __init__(
        self,
        run: Run,
        loader: data.TrainLoader,
        take: Take,
        report: Callable[[str], None],
        calls: Calls,
        shared: Shared,
    ) -> None:
        self._run, self._loader, self._take, self._report = run, loader, take, report
        self._statistics, self._rows = statistics_of(run.spec), run.local_rows()
        self._measured = Microbatched(*_arguments(run)) if self._statistics else None
        self._made: dict[tuple[tuple[Stage, bool], int, int], jax.stages.Wrapped] = {}
        self._exchange, self._holding = NextExchange(run), shared.hold(run)
        self.held = () if self._holding is None else (self._holding.arrays,)
        self.updates = calls.size
        self.sent = Sent(run, self.stage, lambda step: [self._lowered(step)], lambda step: [1])
        if self.updates > 1 and self._holding is None:
            memory.check_call(self.updates, len(self._rows), run.train_set.element_spec)

    def __call__(self, state: TrainState, step: int, updates: int = 1) -> tuple[TrainState, Sums]:
        given = self.take(state, step, updates)
        return self.program(step, False, updates)(state, given, *self.held)

    def stage(self, step: int) -> tuple[Stage, bool]:
        """Returns the next update's stage, and whether that update computes per-example gradients."""
        return self._run.stage(step, self._exchange.current), self._statistics.is_due(step)

    def take(self, state: TrainState, step: int, updates: int) -> Any:
        """Returns the next batch, or its indices and random choices if the devices hold the set."""
        self._exchange.choose(state, step)
        self.sent.last = last = step + updates - 1
        if self.stage(last) != self.stage(step):
            raise ValueError(f"updates {step + 1} to {last + 1} span several stages; split them")
        size = self._run.spec.batch_size
        if self._holding is None:
            return self._run.shard_batch(self._take(updates, size, self._rows), updates)
        return self._holding.take(self._loader, updates, size, self._rows)

    def program(
        self, step: int, compiles: bool, updates: int = 1, runs: int = 1
    ) -> jax.stages.Wrapped:
        """Returns the program of the updates after `step` updates; compiles it now if `compiles`."""
        stage, measures = key = self.stage(step)
        if (key, updates, runs) not in self._made:
            if self._made and all(other != stage for (other, _), *_ in self._made):
                self._report(f"update {step + 1} begins another stage, which is compiled now")
            run, at_once = self._run, None
            if self._measured is not None:
                at_once = self._measured.at_once(run.spec.accumulation_steps, stage, measures)
            read = None if self._holding is None else self._holding.held.read
            options = dict(updates=updates, read=read, runs=runs, global_update=at_once)
            made = run.make_train_step(step, self._exchange.current, **options)
            self._made[key, updates, runs] = made
            if compiles:
                for given in self._inputs(updates):
                    state: Any = run.abstract_state
                    if runs > 1:
                        state, given = (state,) * runs, (given,) * runs
                    made.lower(state, given, *self.held).compile()
        return self._made[key, updates, runs]

    def compile(self, step: int, runs: int = 1) -> None:
        """Compiles the programs of the updates after `step` updates, for `runs` runs."""
        for updates in sorted({1, self.updates}):
            self.program(step, True, updates, runs)
        due = self._statistics.next_due(step)
        # The next update with per-example gradients, unless it belongs to a later stage.
        if self.stage(due) == (self.stage(step)[0], True) and due < self._run.recipe.total_steps:
            self.program(due, True, 1, runs)

    def begin(self, first: int, compiles: bool) -> None:
        """Prepares the updates after `first` updates, and compiles their programs if `compiles`.

        Switches to calls of one update if the convolutions would be slow in a loop on a CPU.
        """
        if compiles:
            self.program(first, True)
        on_cpu = self._run.mesh.devices.flat[0].platform == "cpu"
        if self.updates > 1 and on_cpu:
            if not are_fast_in_loops(self._lowered(first).as_text()):
                self._report(
                    f"{KEY}=1 is used: a CPU computes the convolutions of this network slowly within "
                    "the loop over updates"
                )
                self.updates = 1
        if compiles:
            self.compile(first)

    def _lowered(self, step: int) -> jax.stages.Lowered:
        given = next(self._inputs(1))
        return self.program(step, False).lower(self._run.abstract_state, given, *self.held)

    def _inputs(self, updates: int) -> Iterator[Any]:
        """Yields the shapes of a program's inputs besides the state."""
        held = self._holding
        for shapes in self._run.abstract_batches() if held is None else [held.shapes()]:
            yield stacked(self._run, shapes, updates)


def begins_stage(run: Run) -> Callable[[int], bool]:
    """Returns a predicate: whether the update after `step` updates may need a new program.

    Such an update must be the first in its call.
    """
    statistics = statistics_of(run.spec)
    if run.exchange is None and not isinstance(run.tx, Reducing) and not statistics.per_example:
        return lambda step: False

    def begins(step: int) -> bool:
        return (
            run.stage(step) != run.stage(step - 1)
            or statistics.is_due(step) != statistics.is_due(step - 1)
            or (run.exchange is not None and run.exchange.exchange.due(step))
        )

    return begins


def make_updating(
    run: Run,
    loader: data.TrainLoader,
    compiles: bool = True,
    first: int = 0,
    report: Callable[[str], None] = lambda text: None,
    fail: Callable[[UserError], None] | None = None,
    calls: Calls | None = None,
    shared: Shared | None = None,
    current: CurrentRecipe | None = None,
) -> Updating:
    """Returns the updates of a run; each stage has a program, compiled when the stage begins.

    Args:
      run: the run.
      loader: loader of the rows `run.local_rows` of batches of `config.batch_size` examples.
      compiles: whether to compile the programs of the first update now.
      first: number of completed updates.
      report: called with a line when a later stage begins and is compiled.
      fail: ends a run of several processes with an error of this process, see `Session.fail`; None:
        the error is raised at once.
      calls: divides the updates into calls; None: one update per call.
      shared: the training set that several runs share on the devices; None: this run is alone.
      current: the recipe with the batch sizes decided so far; None: that of `run`.
    """
    take = _taking(loader, fail)
    if run.recipe.path is not None:
        return _make_changing(run, take, compiles, first, current or CurrentRecipe(run.recipe))
    calls = calls or Calls()
    constant = Constant(run, loader, take, report, calls, shared or Shared())
    constant.begin(first, compiles)
    count = calls.count if constant.updates > 1 else lambda step: 1
    return Updating(constant, constant.sent, count, constant)


def _sent_by(program: jax.stages.Lowered | None) -> int:
    """Returns the bytes that a device sends when a program runs; 0 for None."""
    if program is None:
        return 0
    rows = traffic.table(traffic.collectives(program.compile().as_text() or ""))
    return sum(row.sent_bytes for row in rows)


def stacked(
    run: Run, shapes: Mapping[str, jax.ShapeDtypeStruct], updates: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the batches of several updates, given the shapes of one batch."""
    if updates == 1:
        return dict(shapes)
    sharding = mesh_lib.stacked_sharding(run.mesh, updates)
    return {
        name: jax.ShapeDtypeStruct((updates, *shape.shape), shape.dtype, sharding=sharding)
        for name, shape in shapes.items()
    }


def _taking(loader: data.TrainLoader, fail: Callable[[UserError], None] | None) -> Take:
    """Returns the function that takes batches.

    If one of several processes cannot read its rows, that process continues with zeros, because the
    other processes wait for it in each update until all processes end together.
    """

    def read(updates: int, count: int, rows: np.ndarray) -> data.Batch:
        if updates == 1:
            return loader.take(count, rows)
        return loader.take_several(updates, count, rows)

    if fail is None or jax.process_count() == 1:
        return read
    failed = False

    def take(updates: int, count: int, rows: np.ndarray) -> data.Batch:
        nonlocal failed
        if not failed:
            # A call that fails may already have taken some batches.
            examples = loader.examples
            try:
                return read(updates, count, rows)
            except UserError as error:
                failed = True
                loader.examples = examples
                fail(error)
        skipped = [loader.skip(count, rows) for _ in range(updates)]
        if updates == 1:
            return skipped[0]
        return {name: np.stack([batch[name] for batch in skipped]) for name in skipped[0]}

    return take


def _arguments(run: Run) -> tuple[Any, ...]:
    return (
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        run.abstract_rows(batches.granularity(run.spec), run.train_set.element_spec),
        run.spec.parallel.backend,
        run.exchange,
        run.parts,
        run.spec.guards.max_skipped > 0,
        statistics_of(run.spec),
        run.optimizer_at,
    )


def _make_changing(
    run: Run, take: Take, compiles: bool, first: int, current: CurrentRecipe
) -> Updating:
    size, statistics = batches.granularity(run.spec), statistics_of(run.spec)
    step_of, exchange = ChangingStep(*_arguments(run)), NextExchange(run)
    if compiles:
        step_of.compile(first)
        current.value.rate(0)  # compiles the schedule
    rows = rows_lib.local_rows(size, run.mesh)

    def times(step: int) -> tuple[int, ...]:
        count = current.value.batch(step) // size
        return count, count, 1, int(statistics.is_due(step))

    sent = Sent(run, step_of.stage, step_of.lowered, times)

    def update(state: TrainState, step: int) -> tuple[TrainState, Sums]:
        sent.last = step
        microbatches = Microbatches(
            current.value.batch(step) // size,
            lambda: take(1, size, rows),
            lambda batch: rows_lib.shard_batch(batch, size, run.mesh),
        )
        exchange.choose(state, step)
        step_of.exchange = exchange.current
        rate = current.value.rate(step)
        return step_of(state, microbatches, rate, statistics.is_due(step), step)

    return Updating(update, sent)
