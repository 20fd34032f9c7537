"""The training of one run, from its start or a checkpoint to its end.

`train_run` is a generator: it yields to `run.together` when it needs the devices, which several
runs may share.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import jax

from lamb_tpu import data
from lamb_tpu.errors import Interrupted, Preempted, unknown
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import together
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.calls import make_calls
from lamb_tpu.run.describe import describe
from lamb_tpu.run.evaluator import make_evaluator, metric_names
from lamb_tpu.run.preflight import check_data, train_check
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.run.session import Session
from lamb_tpu.run.updating import Updating, begins_stage, make_updating
from lamb_tpu.spec import Config
from lamb_tpu.store.metrics import MetricsWriter, nonfinite
from lamb_tpu.store.position import Position
from lamb_tpu.watch.clock import Clock
from lamb_tpu.watch.evaluations import check_finite
from lamb_tpu.watch.observer import Observers, Record, Start
from lamb_tpu.watch.observers import make_observers
from lamb_tpu.watch.progress import RunProgress, format_seconds, format_values
from lamb_tpu.watch.updates import Updates


def train_run(
    config: Config,
    workdir: str | os.PathLike[str],
    label: str,
    quiet: bool,
    metric: str | None,
    profile: int,
    group: together.Group | None = None,
) -> together.Loop:
    """Runs or resumes a recipe without phases, alone or as one run of a group."""
    # Start-up time includes preparing the data.
    began = time.monotonic()
    run = prepare(config, workdir)
    current = CurrentRecipe(run.recipe)
    progress = _progress(run, current, label, quiet, group)
    observers = make_observers(run, current, progress, profile)
    _check_metrics(run, observers, metric)
    loader = data.TrainLoader(
        run.train_set, run.recipe.batch_size, run.spec.seed, run.local_rows(), train_check(run)
    )
    check_data(run)
    with Session(run, current, observers.keep, progress.warn, group) as session:
        state, position = session.restore()
        step = int(state.step)
        observers.restore(position.observers)
        if session.resumed:
            loader.restore(position.loader)
            progress.message(f"resumed from the checkpoint of update {step}")
        is_over = step == current.value.total_steps or bool(observers.end_reason)
        # Open the records only after restoring: opening removes records newer than the checkpoint.
        records, eval_due = session.open_records(step, position, is_over)
        # Compile everything before the clock starts.
        calls = make_calls(run.spec.loop, run.recipe, observers.ends_call, begins_stage(run), step)
        updating = make_updating(
            run,
            loader,
            not is_over and group is None,
            step,
            progress.message,
            session.fail,
            calls,
            None if group is None else group.shared,
            current,
        )
        if group is not None and not is_over:
            yield together.Call(updating, step, 0, None)
        training = Training(
            run=run,
            current=current,
            progress=progress,
            observers=observers,
            loader=loader,
            session=session,
            evaluate=make_evaluator(run, session.poll_evaluation, session.keep_file),
            updating=updating,
            clock=Clock(position, began),
            updates=Updates(position.unlogged),
            state=state,
            step=step,
            is_over=is_over,
            eval_due=eval_due,
        )
        yield from training.watched(records)
    return training.metrics


def _check_metrics(run: Run, observers: Observers, metric: str | None) -> None:
    """Rejects a misspelt metric before the first evaluation."""
    names = metric_names(run)
    observers.check(names)
    if metric is not None and metric not in names:
        raise unknown("the metric", metric, sorted(names))


def _progress(
    run: Run, current: CurrentRecipe, label: str, quiet: bool, group: together.Group | None
) -> RunProgress:
    """Returns the progress display of a run, after printing the run's settings."""
    beside = None if group is None else group.progress
    progress = RunProgress(
        label=label,
        current=current,
        shown=jax.process_index() == 0,
        quiet=quiet,
        tokens=run.tokens_per_update,
        prefix="" if group is None else f"seed {run.spec.seed}: ",
        beside=beside,
    )
    if beside is None:
        progress.message(describe(run), of_all=True)
    if group is not None and beside is None:
        group.progress = progress
    return progress


@dataclasses.dataclass
class Training:
    """A run in progress, with its components and the state after `step` completed updates.

    Attributes:
      current: the recipe, with the batch sizes that have been decided so far.
      is_over: whether the run was already complete when it was started.
      eval_due, save_due: whether an evaluation or a save is due; the evaluation precedes the save.
    """

    run: Run
    current: CurrentRecipe
    progress: RunProgress
    observers: Observers
    loader: data.TrainLoader
    session: Session
    evaluate: Callable[[TrainState], dict[str, float]]
    updating: Updating
    clock: Clock
    updates: Updates
    state: TrainState
    step: int
    is_over: bool
    eval_due: bool
    save_due: bool = False
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def watched(self, records: MetricsWriter) -> Generator[together.Call, Any, None]:
        """Trains with the observers until the run is complete or the process must end."""
        self.clock.start()
        start = Start(
            step=self.step,
            state=self.state,
            is_over=self.is_over,
            eval_due=self.eval_due,
            clock=self.clock,
            records=records,
            last_checkpoint=self.session.last_checkpoint,
            fail=self.session.fail,
        )
        with self.observers.watching(start):
            try:
                yield from self._loop()
                self._complete()
            except Preempted as notice:
                self._save_preempted(notice)

    def _loop(self) -> Generator[together.Call, Any, None]:
        observers, first_step = self.observers, self.step
        while True:
            self._evaluate_and_save()
            if self.step == self.current.value.total_steps or observers.end_reason:
                return
            # All processes poll after the same updates, so that they all stop at the same update.
            self.session.poll(f"update {self.step}")
            self.session.begin()

            # A call of several updates ends at the first update after which the code below must act.
            count = self.updating.count(self.step)
            observers.updating(self.step)
            made = yield together.Call(self.updating, self.step, count, self.state)
            assert made is not None  # because the call asks for updates
            self.state, sums = made
            self.updates.add(self.step + 1, sums, count)
            self.step += count
            if self.step == first_step + 1:
                self.updates.wait()  # rates and time left are measured from the end of this update
            observers.updated(self.step, self.state)

            recipe = self.current.value
            self.eval_due = recipe.is_due(recipe.eval_every, self.step)
            self.save_due = recipe.is_save_due(self.step) or (
                self.eval_due and observers.saves_evaluations
            )
            # Before a save, the guards check that the metrics are finite and that the devices' copies
            # agree: a bad state must not become a checkpoint.
            may_save = self.save_due or (self.eval_due and observers.may_end_run)
            if may_save:
                observers.saving(self.step, self.state)
            is_recorded = may_save or recipe.is_due(recipe.log_every, self.step)
            if is_recorded or recipe.is_decision_due(self.step):
                observers.fetched(self.updates.fetch())
            if is_recorded:
                self._record()

    def _evaluate_and_save(self) -> None:
        if self.eval_due:
            self.updates.wait()  # otherwise the time of updates would count as evaluation
            with self.observers.paused(self.step, "evaluation"):
                self.metrics = self.evaluate(self.state)
            self.eval_due = False
            if nonfinite(self.metrics):
                # If an update caused the non-finite metrics, the guards raise here and name that update.
                self.observers.fetched(self.updates.fetch())
            self.observers.evaluated(self.step, self.metrics)
        # Save after the evaluation, which may make this the best checkpoint or end the run: a
        # resumed run must not repeat the evaluation.
        if self.save_due or (self.observers.end_reason and self.step > self.session.saved_step):
            with self.observers.paused(self.step, "save"):
                self._save()

    def _record(self) -> None:
        count, means = self.updates.take()
        # Update `step`, counted from 1, used the schedule's value at step - 1.
        means["learning_rate"] = self.current.value.rate(self.step - 1)
        record = Record(self.step, count, self.state, means)
        if (sent := self.updating.sent_bytes()) is not None:
            record.rates["sent_bytes"] = sent
        self.observers.recorded(record)

    def _save(self) -> None:
        position = Position(
            loader=self.loader.state(),
            observers=self.observers.state(),
            unlogged=self.updates.unlogged,
            eval_due=self.eval_due,
            seconds=self.clock.seconds,
            startup=self.clock.startup,
            starts=self.clock.starts,
            end_reason=self.observers.end_reason,
        )
        self.session.save(self.step, self.state, position)

    def _complete(self) -> None:
        step, recipe = self.step, self.current.value
        if self.is_over and not self.metrics:
            report = f"the run was already {self.observers.end_reason or 'complete'}"
            self.metrics = self.evaluate(self.state)
            check_finite(
                f"the evaluation after update {step}",
                self.metrics,
                self.run.spec.guards.allow_nonfinite_eval,
                self.progress.warn,
            )
        else:
            report = f"{step} updates in {format_seconds(self.clock.seconds)}"
            if recipe.path is not None:
                report += f", of {recipe.examples(step) / step:,.1f} examples on average"
        report = f"{report}: {format_values(self.metrics)}; {self.observers.summary()}"
        self.progress.message(report.removesuffix("; "))
        self.observers.completed(step)
        # Raises if the last save, or a record written by the hooks above, has failed.
        self.session.finish()

    def _save_preempted(self, notice: Preempted) -> NoReturn:
        step = self.step
        ended = "interrupted" if isinstance(notice, Interrupted) else "preempted"
        # The seed reproduces the initial state, so there is nothing to save.
        if not step:
            raise type(notice)(
                f"{ended} before the first update; start the same command again"
            ) from None
        if step > self.session.saved_step:  # the notice may arrive right after a save
            # Run the same checks as before any save: a bad state must not become a checkpoint.
            self.observers.saving(step, self.state)
            self.observers.fetched(self.updates.fetch())
            self._save()
        self.session.finish()
        self.observers.preempted(step)
        raise type(notice)(
            f"{ended} at update {step}, saved; start the same command again to resume"
        ) from None
