"""Trains a model by a recipe; started again with the same workdir, it resumes.

  python -m lamb_tpu.train --config=configs/digits.py --workdir=DIR

The workdir receives checkpoints, metrics.jsonl, TensorBoard files, the resolved config, the table
of parameter facts and the versions of the libraries. Any key of the config can be overridden, and
any argument of its optimizer, model, task and data set: --config.duration='500 steps',
--config.optimizer.b2=0.98.
"""

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    cli.define_run_flags(
        workdir="Folder for checkpoints, metrics and the resolved config, also gs://BUCKET/FOLDER. "
        "A folder that already holds a run of the same config is resumed."
    )
    cli.define_process_flags()
    cli.answer_help()

import os
import time

import jax
from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import data, own
from lamb_tpu.cluster import cpu_devices, distributed
from lamb_tpu.config import check_keys
from lamb_tpu.errors import Interrupted, Preempted
from lamb_tpu.run import identity, phases
from lamb_tpu.run.build import prepare
from lamb_tpu.run.describe import describe
from lamb_tpu.run.evaluator import make_evaluator, metric_names
from lamb_tpu.run.preflight import check_data, train_check
from lamb_tpu.run.session import Session
from lamb_tpu.run.updating import make_updating
from lamb_tpu.store.metrics import nonfinite
from lamb_tpu.store.position import Position
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.watch.clock import Clock
from lamb_tpu.watch.evaluations import check_finite
from lamb_tpu.watch.observer import Observers, Record, Start
from lamb_tpu.watch.observers import make_observers
from lamb_tpu.watch.progress import RunProgress, format_seconds, format_values
from lamb_tpu.watch.updates import Updates


@own.calling("training")
def train(
    config: ConfigDict, workdir: str | os.PathLike[str], label: str = "train", quiet: bool = False
) -> dict[str, float]:
    """Runs, or resumes, the recipe `config` in the folder `workdir`; with its phases, if any.

    The run ends after its duration or, with `config.target`, at the first evaluation that reaches
    the target. On SIGTERM and Ctrl-C it saves a checkpoint of the last completed update. Before the
    first update nothing is saved, because the seed gives that state again.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      workdir: receives everything the run writes.
      label: text before the progress bar.
      quiet: whether to show the progress bar only, for a sweep of many runs.

    Returns:
      The metrics of the last evaluation.

    Raises:
      UserError: the config, the data or the workdir has a mistake, found before anything compiles;
        a file of the run can no longer be written; or the run diverged (`guards.Diverged`).
      Preempted: SIGTERM arrived, and everything is saved.
      Interrupted: Ctrl-C arrived, and everything is saved.
    """
    identity.check_start(config, workdir)
    check_keys(config)
    if not config.phases:
        return _train(config, workdir, label, quiet)
    folder, is_first = Workdir(workdir), jax.process_index() == 0
    with distributed.together():
        folder.check(config)
    metrics: dict[str, float] = {}
    # A phase's session locks the phase's folder only, so the folder of all is locked here.
    with folder.hold(is_first):
        due = phases.due(config, workdir)
        if is_first:
            folder.write_config(config)
        complete = sorted(config.phases)[: -len(due)]
        if complete and is_first and not quiet:
            print(f"{', '.join(complete)}: complete, skipped", flush=True)
        for phase in due:
            if is_first and not quiet:
                print(f"{phase.name} (phases: {', '.join(sorted(config.phases))})", flush=True)
            metrics = _train(phase.config, phase.folder, f"{label} {phase.name}", quiet)
    return metrics


def _train(
    config: ConfigDict, workdir: str | os.PathLike[str], label: str, quiet: bool
) -> dict[str, float]:
    """Runs, or resumes, a recipe without phases."""
    # Start-up counts from here, with preparing the data.
    began = time.monotonic()
    run = prepare(config, workdir)
    recipe = run.recipe
    progress = RunProgress(label, recipe, jax.process_index() == 0, quiet, run.tokens_per_update)
    progress.message(describe(run))
    observers = make_observers(run, progress)
    # A misspelt metric must be refused here, not at the first evaluation.
    observers.check(metric_names(run))
    loader = data.TrainLoader(
        run.train_set, recipe.batch_size, config.seed, run.local_rows(), train_check(run)
    )
    check_data(run)

    with Session(run, observers.keep, progress.warn) as session:
        state, position = session.restore()
        # Position of the run: updates, observers, data, and the files of records.
        step = first_step = int(state.step)
        observers.restore(position.observers)
        if session.resumed:
            loader.restore(position.loader)
            progress.message(f"resumed from the checkpoint of update {step}")
        is_over = step == recipe.total_steps or bool(observers.end_reason)
        # Only after restoring: records of updates behind this checkpoint are removed.
        records = session.open_records(step, position, is_over)
        clock, updates = Clock(position, began), Updates(position.unlogged)
        kept = loader, observers, updates, clock
        eval_due, save_due = position.eval_due, False
        metrics: dict[str, float] = {}

        # Everything is compiled here, before the clock starts.
        evaluate = make_evaluator(run, session.poll_evaluation, session.keep_file)
        updating = make_updating(
            run, loader, not is_over, first_step, progress.message, session.fail
        )

        clock.start()
        start = Start(
            step, state, is_over, eval_due, clock, records, session.last_checkpoint, session.fail
        )
        with observers.watching(start):
            try:
                while True:
                    if eval_due:
                        updates.wait()  # otherwise their time would count as the evaluation's
                        with observers.paused(step, "evaluation"):
                            metrics = evaluate(state)
                        eval_due = False
                        if nonfinite(metrics):
                            # An update before it may be the cause, which the guards then name.
                            observers.fetched(updates.fetch())
                        observers.evaluated(step, metrics)
                    # Saved after its evaluation, which may make it the best checkpoint or end the
                    # run, and which a resumed run must not repeat.
                    if save_due or (observers.end_reason and step > session.saved_step):
                        with observers.paused(step, "save"):
                            session.save(step, state, _position(*kept, eval_due))
                    if step == recipe.total_steps or observers.end_reason:
                        break
                    # All processes poll at the same places, so that all of them stop at the same
                    # update.
                    session.poll(f"update {step}")

                    observers.updating(step)
                    state, sums = updating(state, step)
                    step += 1
                    updates.add(step, sums)
                    if step == first_step + 1:
                        updates.wait()  # rates and time left are measured from its end
                    observers.updated(step, state)

                    eval_due = recipe.is_due(recipe.eval_every, step)
                    save_due = recipe.is_save_due(step) or (
                        eval_due and observers.saves_evaluations
                    )
                    # Before a save, the guards must have seen that the metrics are finite, and the
                    # devices' copies are compared: a bad state must not become a checkpoint.
                    may_save = save_due or (eval_due and observers.may_end_run)
                    if may_save:
                        observers.saving(step, state)
                    is_recorded = may_save or recipe.is_due(recipe.log_every, step)
                    if is_recorded or recipe.is_decision_due(step):
                        observers.fetched(updates.fetch())
                    if is_recorded:
                        count, means = updates.take()
                        # Update `step`, counted from 1, used the schedule's value at step - 1.
                        means["learning_rate"] = recipe.rate(step - 1)
                        record = Record(step, count, state, means)
                        if (sent := updating.sent_bytes()) is not None:
                            record.rates["sent_bytes"] = sent
                        observers.recorded(record)

                if is_over and not metrics:
                    told = f"the run was already {observers.end_reason or 'complete'}"
                    metrics = evaluate(state)
                    check_finite(
                        f"the evaluation after update {step}",
                        metrics,
                        config.guards.allow_nonfinite_eval,
                        progress.warn,
                    )
                else:
                    told = f"{step} updates in {format_seconds(clock.seconds)}"
                    if recipe.path is not None:
                        told += f", of {recipe.examples(step) / step:,.1f} examples on average"
                told = f"{told}: {format_values(metrics)}; {observers.summary()}"
                progress.message(told.removesuffix("; "))
                observers.completed(step)
                # Raises if the last save, or a record that the hooks above wrote, has failed.
                session.finish()
            except Preempted as notice:
                ended = "interrupted" if isinstance(notice, Interrupted) else "preempted"
                # The seed gives the initial state again, so there is nothing to save.
                if not step:
                    raise type(notice)(
                        f"{ended} before the first update; start the same command again"
                    ) from None
                if step > session.saved_step:  # the notice may follow right after a save
                    # The same checks as before any save: a bad state must not become a checkpoint.
                    observers.saving(step, state)
                    observers.fetched(updates.fetch())
                    session.save(step, state, _position(*kept, eval_due))
                session.finish()
                observers.preempted(step)
                raise type(notice)(
                    f"{ended} at update {step}, saved; start the same command again to resume"
                ) from None
    return metrics


def _position(
    loader: data.TrainLoader, observers: Observers, updates: Updates, clock: Clock, eval_due: bool
) -> Position:
    return Position(
        loader.state(),
        observers.state(),
        updates.unlogged,
        eval_due,
        clock.seconds,
        clock.startup,
        clock.starts,
        end_reason=observers.end_reason,
    )


def main() -> None:
    """Entry point of the command line."""
    # Both calls must come before anything asks JAX for a device.
    cpu_devices.make_from_flags()
    distributed.initialize_from_flags()
    train(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == "__main__":
    cli.run_main(main, required=("config", "workdir"))
