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
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu import data, models, tasks
from lamb_tpu.checkpoint import Checkpoints
from lamb_tpu.errors import UserError
from lamb_tpu.metrics import MetricsWriter, mean_metrics
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.progress import RunProgress, format_seconds, format_values
from lamb_tpu.recipe import Recipe, make_optimizer, resolve
from lamb_tpu.workdir import Workdir

# How many updates the host may run ahead of the devices: enough to hide the host's work, few
# enough that batches do not pile up in device memory.
_STEPS_IN_FLIGHT = 2


class Diverged(UserError):
    """The loss or the gradient is no longer finite."""


def train(config: ConfigDict, workdir: str | os.PathLike[str]) -> dict[str, float]:
    """Runs, or resumes, the recipe `config` in the folder `workdir`.

    Returns:
      The metrics of the last evaluation.

    Raises:
      UserError: a mistake in the config, the data or the workdir, found before anything compiles;
        or `Diverged`.
    """
    is_first = jax.process_index() == 0
    say = print if is_first else (lambda text: None)

    # What can be refused is refused here, cheapest first.
    task = check_config(config)
    mesh = mesh_lib.make_mesh(config.mesh)
    mesh_lib.check_divides("config.batch_size", config.batch_size, mesh)
    mesh_lib.check_divides("config.eval.batch_size", config.eval.batch_size, mesh)
    folder = Workdir(workdir)
    folder.check(config)
    train_set = load_split(config, config.data.train_split)
    eval_set = load_split(config, config.data.eval_split)
    recipe = resolve(config, len(train_set))
    tx, rules = make_optimizer(config, recipe)

    init = step_lib.make_init(task, tx, config.seed, one_example(train_set))
    abstract_state = step_lib.abstract_state(init, mesh)
    table = parameters.table(abstract_state.params, rules)
    folder.check_parameters(table)
    if is_first:
        folder.write_receipt(config, table, {"mesh": dict(mesh.shape)})
    for line in (describe_devices(mesh), describe_data(config, train_set, eval_set), recipe):
        say(line.describe() if isinstance(line, Recipe) else line)
    say(f"{config.model.name}, {config.optimizer.name}, workdir {folder.path}\n{table}")

    loader = data.TrainLoader(
        train_set, config.batch_size, config.seed,
        process_index=jax.process_index(), process_count=jax.process_count(),
    )
    with Checkpoints(folder.checkpoints, config.checkpoint.keep, say) as checkpoints:
        restored = checkpoints.restore_latest(abstract_state)
        if restored is None:
            state = jax.jit(init, out_shardings=mesh_lib.replicated(mesh))()
            seconds_before = 0.0
        else:
            state, position = restored
            loader.restore(position["loader"])
            seconds_before = position["seconds"]
            say(f"resumed from the checkpoint of update {int(state.step)}")
        writer = MetricsWriter(folder.path, config.log.tensorboard and is_first, int(state.step))
        progress = RunProgress("train", recipe.total_steps, recipe.batch_size, is_first)
        run = _Run(config, recipe, task, tx, mesh, eval_set, checkpoints, writer, progress)
        try:
            with progress:
                return run.loop(state, loader, seconds_before)
        finally:
            writer.close()


class _Run:
    """The loop of `train`, and what it reads at every update."""

    def __init__(
        self,
        config: ConfigDict,
        recipe: Recipe,
        task: tasks.Task,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        eval_set: data.Source,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        progress: RunProgress,
    ) -> None:
        self.recipe, self.mesh, self.eval_set = recipe, mesh, eval_set
        self.eval_batch_size = config.eval.batch_size
        self.checkpoints, self.writer, self.progress = checkpoints, writer, progress
        self.train_step = step_lib.make_train_step(task, tx, mesh)
        self.eval_step = step_lib.make_eval_step(task, mesh)

    def loop(
        self, state: step_lib.TrainState, loader: data.TrainLoader, seconds_before: float
    ) -> dict[str, float]:
        recipe, start = self.recipe, time.monotonic()
        first_step = step = int(state.step)
        last_metrics: dict[str, float] = {}
        pending: list[tuple[int, dict[str, jax.Array]]] = []
        in_flight: collections.deque[Any] = collections.deque()

        if step >= recipe.total_steps:
            self.progress.message(f"the run is complete: {step} updates")
            return self._evaluate(state, step)
        while step < recipe.total_steps:
            batch = mesh_lib.shard_batch(next(loader), self.mesh)
            state, metrics = self.train_step(state, batch)
            step += 1
            pending.append((step, metrics))
            in_flight.append(metrics)
            if step == first_step + 1:
                jax.block_until_ready(metrics)
                self.progress.message(
                    f"first update after {time.monotonic() - start:.1f} s, compilation included"
                )
                self.progress.start(step)
            if len(in_flight) > _STEPS_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())

            log, evaluate, save = (
                recipe.is_due(every, step)
                for every in (recipe.log_every, recipe.eval_every, recipe.checkpoint_every)
            )
            if log or save:
                values = self._log(pending, seconds_before + time.monotonic() - start)
                pending = []
                self.progress.update(step, values)
            if evaluate:
                last_metrics = self._evaluate(state, step)
            if save:
                position = {
                    "loader": loader.state(),
                    "seconds": seconds_before + time.monotonic() - start,
                }
                self.checkpoints.save(step, state, position)
        seconds = seconds_before + time.monotonic() - start
        self.progress.message(
            f"{recipe.total_steps} updates in {format_seconds(seconds)}: "
            f"{format_values(last_metrics)}"
        )
        return last_metrics

    def _log(
        self, pending: list[tuple[int, dict[str, jax.Array]]], seconds: float
    ) -> dict[str, float]:
        """Writes the means over the updates since the last record; stops a run that diverged."""
        fetched = jax.device_get(pending)
        for step, metrics in fetched:
            bad = [name for name, value in metrics.items() if not math.isfinite(value)]
            if bad:
                self._stop_diverged(step, bad[0], float(metrics[bad[0]]))
        step = fetched[-1][0]
        values = {
            name: float(np.mean([metrics[name] for _, metrics in fetched], dtype=np.float64))
            for name in fetched[-1][1]
        }
        values["learning_rate"] = float(self.recipe.learning_rate(step - 1))
        self.writer.write(
            step,
            "train",
            {**values, "epoch": self._epochs(step), "updates": len(fetched), "seconds": seconds},
        )
        return values

    def _evaluate(self, state: step_lib.TrainState, step: int) -> dict[str, float]:
        metrics = evaluate(self.eval_step, state, self.eval_set, self.eval_batch_size, self.mesh)
        self.writer.write(step, "eval", {**metrics, "epoch": self._epochs(step)})
        self.progress.message(
            f"update {step} (epoch {self._epochs(step):.4g}): evaluation {format_values(metrics)}"
        )
        return metrics

    def _epochs(self, step: int) -> float:
        return step * self.recipe.batch_size / self.recipe.num_examples

    def _stop_diverged(self, step: int, name: str, value: float) -> None:
        self.checkpoints.close()
        saved = self.checkpoints.steps()
        last = f"{self.checkpoints.directory}/{saved[-1]}" if saved else "none was saved yet"
        rate = float(self.recipe.learning_rate(step - 1))
        raise Diverged(
            f"{name} became {value} at update {step} (learning rate {rate:.4g}); last checkpoint: "
            f"{last}. Try a lower config.optimizer.learning_rate, a longer config.schedule.warmup "
            "or config.optimizer.clip_global_norm=1.0, in a new --workdir"
        )


def evaluate(
    eval_step: Any,
    state: step_lib.TrainState,
    source: data.Source,
    batch_size: int,
    mesh: Mesh,
) -> dict[str, float]:
    """The task's metrics over every example of `source`, each counted exactly once."""

    def sums() -> Iterator[Mapping[str, Any]]:
        batches = data.eval_batches(source, batch_size, jax.process_index(), jax.process_count())
        for batch in batches:
            yield eval_step(state.params, state.model_state, mesh_lib.shard_batch(batch, mesh))

    return mean_metrics(sums())


def check_config(config: ConfigDict) -> tasks.Task:
    """Refuses a config that cannot run, as far as can be told without data; builds its task."""
    config_lib.check_keys(config)
    config_lib.check_positive(
        config, "batch_size", "eval.batch_size", "checkpoint.keep", "schedule.base_batch_size"
    )
    model = models.build(**config.model)
    return tasks.build(model=model, **config.task)


def load_split(config: ConfigDict, split: str) -> data.Source:
    """A split of the config's data set."""
    return data.load(
        config.data.name,
        split,
        data_dir=config.data.prepared_dir,
        source_dir=config.data.dir,
    )


def one_example(source: data.Source) -> dict[str, np.ndarray]:
    """A batch of one, for the shapes."""
    return source.gather(np.zeros(1, np.int64))


def describe_devices(mesh: Mesh) -> str:
    """'mesh data=1 over 1 cpu device (1 process)'."""
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    kind, count = jax.devices()[0].device_kind, jax.device_count()
    return f"mesh {shape} over {count} x {kind} in {jax.process_count()} process(es)"


def describe_data(config: ConfigDict, train_set: data.Source, eval_set: data.Source) -> str:
    """'data mnist: train 60,000, test 10,000 examples'."""
    return (
        f"data {config.data.name}: {config.data.train_split} {len(train_set):,}, "
        f"{config.data.eval_split} {len(eval_set):,} examples"
    )


def main(config: ConfigDict, workdir: str) -> None:
    """Entry point of the command line."""
    train(config, workdir)


config_lib.define_flags()

if __name__ == "__main__":
    config_lib.run_main(main)
