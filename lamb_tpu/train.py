"""Trains a model by a recipe; started again with the same workdir, it resumes.

  python -m lamb_tpu.train --config=configs/digits.py --workdir=DIR

The workdir receives checkpoints, metrics.jsonl, TensorBoard files, the resolved config, the table
of parameter facts and the versions that ran. Any key of the config can be overridden, and whatever
its optimizer, model, task and data set take, for example --config.duration='500 steps' and
--config.optimizer.b2=0.98.
"""

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    cli.define_run_flags(
        workdir="Folder for checkpoints, metrics and the resolved config. A folder that already "
        "holds a run of the same config is resumed."
    )
    cli.define_process_flags()
    cli.answer_help()

import collections
import os
import time
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import data, distributed, phases, tasks
from lamb_tpu.best import Best
from lamb_tpu.checkpoint import Checkpoints
from lamb_tpu.config import check_keys
from lamb_tpu.desync import make_desync_check
from lamb_tpu.errors import Interrupted, Preempted, UserError
from lamb_tpu.evaluate import make_evaluator, metric_names
from lamb_tpu.guards import Guards
from lamb_tpu.heartbeat import Heartbeat
from lamb_tpu.metrics import MetricsWriter, mean_metrics
from lamb_tpu.mlperf import MLPerfLog
from lamb_tpu.optim import readings
from lamb_tpu.preemption import Preemption
from lamb_tpu.progress import RunProgress, format_seconds, format_values
from lamb_tpu.run import prepare
from lamb_tpu.target import Target
from lamb_tpu.throughput import Throughput
from lamb_tpu.workdir import Workdir

# How many updates the host may run ahead of the devices: enough to hide the host's work, few
# enough that batches do not pile up in device memory.
_STEPS_IN_FLIGHT = 2


def train(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    label: str = "train",
    quiet: bool = False,
) -> dict[str, float]:
    """Runs, or resumes, the recipe `config` in the folder `workdir`; see `phases` for several.

    It ends with its duration or, where `config.target` says so, at the first evaluation that
    reaches the target.

    SIGTERM and Ctrl-C are answered by a checkpoint of the last completed update; only before the
    first one is nothing saved, because the seed gives that state again.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      workdir: receives everything the run writes.
      label: stands before the progress bar.
      quiet: show the progress bar only, for a sweep of many runs.

    Returns:
      The metrics of the last evaluation.

    Raises:
      UserError: a mistake in the config, the data or the workdir, found before anything compiles;
        a file of the run that can no longer be written; or `guards.Diverged`.
      Preempted: SIGTERM has come, and all is saved.
      Interrupted: Ctrl-C has come, and all is saved.
    """
    check_keys(config)
    if not config.phases:
        return _train(config, workdir, label, quiet)
    folder, is_first = Workdir(workdir), jax.process_index() == 0
    folder.check(config)
    metrics: dict[str, float] = {}
    with folder.hold(is_first):
        due = phases.due(config, workdir)
        if is_first:
            folder.write_config(config)
        complete = sorted(config.phases)[: -len(due)]
        if complete and is_first and not quiet:
            print(f"{', '.join(complete)}: complete, passed over", flush=True)
        for phase in due:
            if is_first and not quiet:
                print(f"{phase.name} (phases: {', '.join(sorted(config.phases))})", flush=True)
            metrics = _train(phase.config, phase.folder, f"{label} {phase.name}", quiet)
    return metrics


def _train(
    config: ConfigDict, workdir: str | os.PathLike[str], label: str, quiet: bool
) -> dict[str, float]:
    """`train` of one run."""
    began = time.monotonic()
    run = prepare(config, workdir)
    recipe, folder, mesh = run.recipe, run.folder, run.mesh
    assert folder is not None  # a workdir is given
    is_first = jax.process_index() == 0
    amounts = run.amounts()
    throughput, tokens = Throughput(amounts), int(amounts.get("tokens_per_second", 0))
    progress = RunProgress(label, recipe.total_steps, recipe.batch_size, is_first, quiet, tokens)
    progress.message(run.describe())

    best = Best(config.checkpoint.best, config.checkpoint.best_mode)
    target = Target(config.target)
    names = metric_names(run)
    best.check(names)
    target.check(names)
    loader = data.TrainLoader(
        run.train_set,
        config.batch_size,
        config.seed,
        run.local_rows(),
    )
    with (
        folder.hold(is_first),
        Preemption() as preemption,
        distributed.Watchdog(config.guards.hang_seconds) as watchdog,
        Checkpoints(
            folder.checkpoints,
            config.checkpoint.keep,
            progress.warn,
            keep_besides=lambda step: step == best.step or recipe.is_due(recipe.keep_every, step),
        ) as checkpoints,
    ):
        restored = checkpoints.restore_latest(run.abstract_state)
        position: dict[str, Any] = {}
        if restored is None:
            state = run.first_state()
        else:
            state, position = restored
            loader.restore(position["loader"])
            best.restore(position["best"])
            target.restore(position["target"])
            progress.message(f"resumed from the checkpoint of update {int(state.step)}")
        first_step = saved_step = step = int(state.step)
        is_over = step == recipe.total_steps or target.ends_run
        seconds_before, starts = position.get("seconds", 0.0), position.get("starts", 0) + 1
        # What a preempted run had in hand: metrics of updates since its last record, and an
        # evaluation that was broken off.
        unlogged: list[tasks.Sums] = position.get("unlogged", [])
        eval_due: bool = position.get("eval_due", False)
        with distributed.together():
            if is_first and not is_over:
                facts = {
                    "mesh": dict(mesh.shape), "batch_norm": run.batch_norm, "from_step": step,
                }
                if restored is None and run.start is not None:
                    folder.write_init(run.start.record)
                folder.write_receipt(config, run.table, facts, run.train_set)
            writer = MetricsWriter(
                folder.path, first_step, config.log.tensorboard, is_first, not eval_due,
                preemption.fail,
            )

        def last_checkpoint() -> str:
            checkpoints.wait()
            saved = checkpoints.steps()
            return str(checkpoints.directory / str(saved[-1])) if saved else "not yet written"

        guards = Guards(
            config.guards, recipe.learning_rates, int(state.skipped), last_checkpoint, progress.warn
        )
        guards.restore(position.get("guards", []))

        def copied(state: Any) -> dict[str, Any]:
            return {"params": state.params, **state.model_state}

        def seconds() -> float:
            return seconds_before + time.monotonic() - start

        def clock() -> dict[str, float]:
            now = seconds()
            return {"seconds": now, "seconds_with_startup": now + startup, "starts": starts}

        def go_on(completed: str) -> None:
            watchdog.progress(completed)
            if (failure := checkpoints.failure()) is not None:
                preemption.fail(failure)
            preemption.poll()

        def keep_file(name: str, text: str) -> None:
            try:
                folder.write_file(name, text)
            except UserError as error:
                preemption.fail(error)

        def look() -> None:
            """Fetches the metrics of the updates since the last look and passes judgement."""
            fetched = jax.device_get(unseen)
            for spike_step, spike in guards.look(fetched).items():
                writer.write(spike_step, "spike", spike)
                progress.message(
                    f"update {spike_step}: loss spike of {spike['loss']:.4g}, the recent median is "
                    f"{spike['median']:.4g}"
                )
            unlogged.extend(jax.tree.map(float, sums) for _, sums in fetched)
            unseen.clear()

        def save() -> None:
            preemption.settle()  # not a state whose records could not be written: they would lack
            position = {
                "loader": loader.state(),
                "seconds": seconds(),
                "startup": startup,
                "starts": starts,
                "unlogged": unlogged,
                "eval_due": eval_due,
                "best": best.state(),
                "target": target.state(),
                "guards": guards.state(),
            }
            checkpoints.save(step, state, position)

        check_copies = make_desync_check(copied(run.abstract_state), mesh)
        train_step = run.make_train_step()
        evaluate = make_evaluator(
            run, between=lambda: go_on("a batch of the evaluation"), keep_file=keep_file
        )
        if not is_over:  # compiled here, before the clock starts, as the evaluation was
            train_step.lower(run.abstract_state, run.abstract_batch()).compile()
        in_flight: collections.deque[Any] = collections.deque()
        unseen: list[tuple[int, tasks.Sums]] = []
        save_due = False
        eval_metrics: dict[str, float] = {}
        has_log = config.log.mlperf and is_first and target.reached is None
        mlperf = MLPerfLog(
            folder.path / "mlperf.log" if has_log and (eval_due or not is_over) else None,
            recipe, step, config.target.metric, preemption.fail,
        )
        start = time.monotonic()
        mlperf.describe(run, start - began)
        startup = position.get("startup", 0.0) + start - began

        with progress, writer, mlperf, Heartbeat(config.log.heartbeat_seconds, step) as heartbeat:
            try:
                while True:
                    if eval_due:
                        # Else updates under way would end in the evaluation's time.
                        jax.block_until_ready(list(in_flight))
                        with throughput.paused(), mlperf.evaluation(step):
                            eval_metrics = evaluate(state)
                        eval_due = False
                        best.see(step, eval_metrics)
                        epoch = recipe.epoch(step)
                        writer.write(step, "eval", {**eval_metrics, "epoch": epoch})
                        mlperf.accuracy(step, eval_metrics)
                        progress.message(
                            f"update {step} (epoch {epoch:.4g}): {format_values(eval_metrics)}"
                        )
                        if target.see(step, epoch, eval_metrics, clock()):
                            writer.write(step, "target", target.reached or {})
                            mlperf.success(step)
                            if not target.ends_run:
                                progress.message(target.describe())
                    if save_due or (target.ends_run and step > saved_step):
                        with throughput.paused():
                            save()
                        saved_step = step
                    if step == recipe.total_steps or target.ends_run:
                        break
                    go_on(f"update {step}")

                    mlperf.train(step)
                    batch = run.shard_batch(next(loader))
                    state, metrics = train_step(state, batch)
                    heartbeat.step = step = step + 1
                    unseen.append((step, metrics))
                    in_flight.append(metrics)
                    if len(in_flight) > _STEPS_IN_FLIGHT:
                        jax.block_until_ready(in_flight.popleft())
                    if step == first_step + 1:
                        jax.block_until_ready(metrics)
                        progress.start(step, time.monotonic() - began)
                        throughput.start(step)

                    eval_due = recipe.is_due(recipe.eval_every, step)
                    save_due = (
                        recipe.is_due(recipe.checkpoint_every, step)
                        or recipe.is_due(recipe.keep_every, step)
                        or (eval_due and config.checkpoint.best != "")
                    )
                    # What is saved has been compared, and its metrics were seen to be finite.
                    may_save = save_due or (eval_due and target.may_end_run)
                    if recipe.desync_every and (
                        may_save or recipe.is_due(recipe.desync_every, step)
                    ):
                        check_copies(copied(state), step)
                    if may_save or recipe.is_due(recipe.log_every, step):
                        look()
                        values = mean_metrics(unlogged)
                        values["learning_rate"] = float(recipe.learning_rates[step - 1])
                        if "skipped" in values:
                            values["skipped"] = guards.skipped
                        values |= readings.summary(state.opt_state, run.facts)
                        rates = throughput.read(step)
                        if "mfu" in rates:
                            values["mfu"] = rates["mfu"]
                        counts = {
                            "epoch": recipe.epoch(step),
                            "updates": len(unlogged),
                            "seconds": seconds(),
                        }
                        writer.write(step, "train", values | counts | rates)
                        layers = readings.scalars(state.opt_state)
                        if layers:
                            ordered = readings.in_order(layers, run.parameter_order)
                            writer.write(step, "layers", ordered)
                        progress.update(step, values)
                        unlogged = []

                told = f"{step} updates in {format_seconds(seconds())}"
                if is_over and not eval_metrics:
                    ended = "stopped at its target" if target.ends_run else "complete"
                    told = f"the run was already {ended}"
                    eval_metrics = evaluate(state)
                told += f": {format_values(eval_metrics)}; {target.describe()}"
                progress.message(told.removesuffix("; "))
                if not is_over and (pictures := run.counts_read()):
                    writer.write(step, "pictures", pictures)
                    progress.message(run.describe_read())
                checkpoints.wait()
                writer.close()
                preemption.settle()
            except Preempted as notice:
                ended = "interrupted" if isinstance(notice, Interrupted) else "preempted"
                if not step:
                    raise type(notice)(
                        f"{ended} before the first update; start the same command again"
                    ) from None
                if step > saved_step:
                    if recipe.desync_every:
                        check_copies(copied(state), step)
                    look()
                    save()
                checkpoints.wait()
                if told := run.describe_read():
                    progress.message(told)
                raise type(notice)(
                    f"{ended} at update {step}, saved; start the same command again to resume"
                ) from None
    return eval_metrics


def main() -> None:
    """Entry point of the command line."""
    distributed.initialize_from_flags()
    train(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == "__main__":
    cli.run_main(main, required=("config", "workdir"))
