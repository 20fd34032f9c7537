"""Trains a model by a recipe; started again with the same workdir, it resumes.

  python -m lamb_tpu.train --config=configs/digits.py --workdir=DIR

The workdir receives checkpoints, metrics.jsonl, TensorBoard files, the resolved config, the table
of parameter facts and the versions that ran. Any key of the config can be overridden, for example
--config.optimizer.learning_rate=0.002 or --config.duration='500 steps'.
"""

import collections
import math
import os
import time
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import cli, data, distributed, tasks
from lamb_tpu.checkpoint import Checkpoints
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import make_evaluator
from lamb_tpu.metrics import MetricsWriter, mean_metrics
from lamb_tpu.optim import readings
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.progress import RunProgress, format_seconds, format_values
from lamb_tpu.recipe import Recipe
from lamb_tpu.run import prepare

# How many updates the host may run ahead of the devices: enough to hide the host's work, few
# enough that batches do not pile up in device memory.
_STEPS_IN_FLIGHT = 2


class Diverged(UserError):
    """The loss, the gradient or the parameters are no longer finite."""


def train(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    label: str = "train",
    quiet: bool = False,
) -> dict[str, float]:
    """Runs, or resumes, the recipe `config` in the folder `workdir`.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      workdir: receives everything the run writes.
      label: stands before the progress bar.
      quiet: show the progress bar only, for a sweep of many runs.

    Returns:
      The metrics of the last evaluation.

    Raises:
      UserError: a mistake in the config, the data or the workdir, found before anything compiles;
        or `Diverged`.
    """
    began = time.monotonic()
    run = prepare(config, workdir)
    recipe, folder, mesh = run.recipe, run.folder, run.mesh
    is_first = jax.process_index() == 0
    progress = RunProgress(label, recipe.total_steps, recipe.batch_size, is_first, quiet)
    progress.message(run.describe())

    loader = data.TrainLoader(
        run.train_set,
        config.batch_size,
        config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    with (
        folder.hold(is_first),
        Checkpoints(folder.checkpoints, config.checkpoint.keep, progress.warn) as checkpoints,
    ):
        restored = checkpoints.restore_latest(run.abstract_state)
        if restored is None:
            key = jax.random.key(config.seed)
            state = jax.jit(run.init, out_shardings=mesh_lib.replicated(mesh))(key)
            seconds_before = 0.0
        else:
            state, position = restored
            loader.restore(position["loader"])
            seconds_before = position["seconds"]
            progress.message(f"resumed from the checkpoint of update {int(state.step)}")
        first_step = step = int(state.step)
        if is_first and step < recipe.total_steps:
            folder.write_receipt(config, run.table, {"mesh": dict(mesh.shape), "from_step": step})
        writer = MetricsWriter(folder.path, first_step, config.log.tensorboard, is_first)

        train_step = step_lib.make_train_step(run.task, run.tx, mesh)
        evaluate = make_evaluator(run)
        start = time.monotonic()
        in_flight: collections.deque[Any] = collections.deque()
        unlogged: list[tuple[int, tasks.Sums]] = []
        eval_metrics: dict[str, float] = {}

        with progress, writer:
            while step < recipe.total_steps:
                batch = mesh_lib.shard_batch(next(loader), mesh)
                state, metrics = train_step(state, batch)
                step += 1
                unlogged.append((step, metrics))
                in_flight.append(metrics)
                if len(in_flight) > _STEPS_IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
                if step == first_step + 1:
                    jax.block_until_ready(metrics)
                    progress.start(step, time.monotonic() - began)

                seconds = seconds_before + time.monotonic() - start
                epoch = step * recipe.batch_size / recipe.num_examples
                save = recipe.is_due(recipe.checkpoint_every, step)
                # A state is saved only after its metrics were seen to be finite.
                if save or recipe.is_due(recipe.log_every, step):
                    values = _means_of_finite(unlogged, recipe, checkpoints)
                    writer.write(
                        step,
                        "train",
                        {**values, "epoch": epoch, "updates": len(unlogged), "seconds": seconds},
                    )
                    layers = readings.scalars(state.opt_state)
                    if layers:
                        writer.write(step, "layers", layers)
                    progress.update(step, values)
                    unlogged = []
                if recipe.is_due(recipe.eval_every, step):
                    eval_metrics = evaluate(state)
                    writer.write(step, "eval", {**eval_metrics, "epoch": epoch})
                    progress.message(
                        f"update {step} (epoch {epoch:.4g}): {format_values(eval_metrics)}"
                    )
                if save:
                    position = {"loader": loader.state(), "seconds": seconds}
                    checkpoints.save(step, state, position)

            if first_step == recipe.total_steps:
                eval_metrics = evaluate(state)
                progress.message(f"the run was already complete: {format_values(eval_metrics)}")
            else:
                seconds = seconds_before + time.monotonic() - start
                progress.message(
                    f"{step} updates in {format_seconds(seconds)}: {format_values(eval_metrics)}"
                )
    return eval_metrics


def _means_of_finite(
    unlogged: list[tuple[int, tasks.Sums]], recipe: Recipe, checkpoints: Checkpoints
) -> dict[str, float]:
    """The metrics over some updates, sums over weights, with the last one's learning rate.

    Raises:
      Diverged: one of them is not finite.
    """
    fetched = jax.device_get(unlogged)
    for step, sums in fetched:
        for name, (total, _) in sums.items():
            if not math.isfinite(total):
                checkpoints.close()
                saved = checkpoints.steps()
                raise Diverged(
                    f"{name} became {float(total)} at update {step}, at the learning rate "
                    f"{recipe.learning_rates[step - 1]:.4g}; the last checkpoint is "
                    f"{checkpoints.directory / str(saved[-1]) if saved else 'not yet written'}. "
                    "Try, in a new --workdir, a lower config.optimizer.learning_rate, a longer "
                    "config.schedule.warmup or config.optimizer.clip_global_norm"
                )
    last_step, _ = fetched[-1]
    means = mean_metrics(sums for _, sums in fetched)
    return {**means, "learning_rate": float(recipe.learning_rates[last_step - 1])}


def main() -> None:
    """Entry point of the command line."""
    distributed.initialize_from_flags()
    train(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == "__main__":
    cli.define_run_flags()
    distributed.define_flags()
    cli.run_main(main, required=("config", "workdir"))
