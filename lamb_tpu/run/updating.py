"""The updates of a run, from the examples that its loader gives next."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lamb_tpu import data
from lamb_tpu.cost import traffic
from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.gradient_statistics import Statistics
from lamb_tpu.parallel.parts import RESIDUAL
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.parallel.step import Stage
from lamb_tpu.run import batches
from lamb_tpu.run.build import Run
from lamb_tpu.run.statistics import statistics_of
from lamb_tpu.tasks import Sums

Take = Callable[[int, np.ndarray], data.Batch]


class Microbatches(Sequence[Mapping[str, jax.Array]]):
    """The microbatches of an update, in host memory; each goes to the devices when it is asked for.

    The devices hold those that they work on, and those for which the host has run ahead. A task
    whose weights depend on the examples asks for each twice.

    Args:
      count: number of microbatches.
      read: returns the next one; it is called as they are first asked for, in order.
      place: puts one onto the devices.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[], data.Batch],
        place: Callable[[data.Batch], Mapping[str, jax.Array]],
    ) -> None:
        self._count, self._read, self._place = count, read, place
        self._kept: list[data.Batch] = []

    def __len__(self) -> int:
        """Returns the number of microbatches."""
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Returns a microbatch on the devices."""
        if index >= self._count:
            raise IndexError(index)
        while len(self._kept) <= index:
            self._kept.append(self._read())
        return self._place(self._kept[index])


class Exchanges:
    """The exchange of a run's next update, where it depends on the state.

    Args:
      run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._began = run, False
        self.current = run.exchange

    def choose(self, state: TrainState, step: int) -> None:
        """Takes the exchange for the update after `step` completed ones, see `Exchange.chosen`."""
        if self.current is None or not (self.current.exchange.due(step) or not self._began):
            return
        self._began = True
        if RESIDUAL in state.parts:
            kept = state.parts[RESIDUAL]["kept"]
            self.current = self.current.chosen(self._run.abstract_state.params, kept)


@dataclasses.dataclass(frozen=True)
class Updating:
    """The updates of a run: `(state, step) -> (state, sums)`, the one after `step` completed ones.

    It takes its examples from the loader; the state's buffers are donated.

    Attributes:
      update: this function.
      sent_bytes: a function to the bytes that a device sends in the last update, read from its
        compiled program; None where the compiler places the collectives, on one device, and with
        batches that change.
    """

    update: Callable[[TrainState, int], tuple[TrainState, Sums]]
    sent_bytes: Callable[[], int | None] = lambda: None

    def __call__(self, state: TrainState, step: int) -> tuple[TrainState, Sums]:
        """Makes an update."""
        return self.update(state, step)


def make_updating(
    run: Run,
    loader: data.TrainLoader,
    compiles: bool = True,
    first: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    fail: Callable[[UserError], None] | None = None,
) -> Updating:
    """Returns the updates of a run.

    Each stage of the run has a program of its own, which is compiled when the stage begins.

    Args:
      run: the run.
      loader: gives the training examples, `run.local_rows` of batches of `config.batch_size`.
      compiles: whether to compile here what the first update needs, so that it does not.
      first: number of completed updates.
      tell: called with a line when a further stage begins, which is compiled.
      fail: ends a run of several processes with an error of this one, see `Session.fail`; None
        raises it at once.
    """
    take = _taking(loader, fail)
    statistics = statistics_of(run.config)
    if run.recipe.path is not None or statistics:
        return _make_changing(run, take, statistics, compiles, first)
    programs: dict[Stage, jax.stages.Wrapped] = {}
    exchanges = Exchanges(run)

    def program(step: int, compiles: bool) -> jax.stages.Wrapped:
        stage = run.stage(step, exchanges.current)
        if stage not in programs:
            if programs:
                tell(f"update {step + 1} begins another stage, which is compiled now")
            programs[stage] = run.make_train_step(step, exchanges.current)
            if compiles:
                for shapes in run.abstract_batches():
                    programs[stage].lower(run.abstract_state, shapes).compile()
        return programs[stage]

    if compiles:
        program(first, True)

    last = first
    size, rows = run.config.batch_size, run.local_rows()
    sent: dict[Stage, int] = {}

    def update(state: TrainState, step: int) -> tuple[TrainState, Sums]:
        nonlocal last
        last = step
        exchanges.choose(state, step)
        return program(step, False)(state, run.shard_batch(take(size, rows)))

    def sent_bytes() -> int | None:
        if run.config.parallel.backend == "jit" or mesh_lib.num_batch_shards(run.mesh) == 1:
            return None
        stage = run.stage(last, exchanges.current)
        if stage not in sent:
            shapes = next(iter(run.abstract_batches()))
            compiled = program(last, False).lower(run.abstract_state, shapes).compile()
            rows = traffic.table(traffic.collectives(compiled.as_text() or ""))
            sent[stage] = sum(row.sent_bytes for row in rows)
        return sent[stage]

    return Updating(update, sent_bytes)


def _taking(loader: data.TrainLoader, fail: Callable[[UserError], None] | None) -> Take:
    """Returns `loader.take`; of several processes, one that cannot read goes on with zeros.

    The others wait for it in each update until all processes end together.
    """
    if fail is None or jax.process_count() == 1:
        return loader.take
    failed = False

    def take(count: int, rows: np.ndarray) -> data.Batch:
        nonlocal failed
        if not failed:
            try:
                return loader.take(count, rows)
            except UserError as error:
                failed = True
                fail(error)
        return loader.skip(count, rows)

    return take


def _make_changing(
    run: Run, take: Take, statistics: Statistics, compiles: bool, first: int
) -> Updating:
    config, recipe, size = run.config, run.recipe, batches.quantum(run.config)
    step_of = ChangingStep(
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        run.abstract_rows(size, run.train_set.element_spec),
        config.parallel.backend,
        run.exchange,
        run.parts,
        config.guards.max_skipped > 0,
        statistics,
    )
    exchanges = Exchanges(run)
    if compiles:
        step_of.compile(first)
        recipe.rate(0)  # the program of the schedule
    rows = mesh_lib.local_rows(size, run.mesh)

    def update(state: TrainState, step: int) -> tuple[TrainState, Sums]:
        microbatches = Microbatches(
            recipe.batch(step) // size,
            lambda: take(size, rows),
            lambda batch: mesh_lib.shard_batch(batch, size, run.mesh),
        )
        exchanges.choose(state, step)
        step_of.exchange = exchanges.current
        return step_of(state, microbatches, recipe.rate(step), statistics.is_due(step), step)

    return Updating(update)
