"""Everything a run needs before its first update, checked; `train` and `evaluate` start here."""

import dataclasses
import os
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu import data, models, tasks
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.recipe import Recipe, naming, resolve, resolve_optimizer
from lamb_tpu.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Run:
    """A config made concrete.

    Attributes:
      config: the config.
      folder: the workdir.
      mesh: over all devices.
      task: the learning problem, with its model.
      train_set, eval_set: the data.
      recipe: durations in updates, and the learning rate.
      tx: the optimizer.
      init: makes the state before the first update from a random key.
      abstract_state: its shapes, dtypes and shardings.
      table: the table of parameter facts.
    """

    config: ConfigDict
    folder: Workdir
    mesh: Mesh
    task: tasks.Task
    train_set: data.Source
    eval_set: data.Source
    recipe: Recipe
    tx: optax.GradientTransformation
    init: Callable[[jax.Array], step_lib.TrainState]
    abstract_state: step_lib.TrainState
    table: str

    def describe(self) -> str:
        """What was resolved, for the person at the terminal."""
        config, devices = self.config, jax.devices()
        shape = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return (
            f"workdir: {self.folder.path}\n"
            f"mesh: {shape} over {len(devices)} {devices[0].device_kind} device(s) "
            f"in {jax.process_count()} process(es)\n"
            f"data: {config.data.name}, {config.data.train_split} {len(self.train_set):,} and "
            f"{config.data.eval_split} {len(self.eval_set):,} examples\n"
            f"{self.recipe.describe()}\n"
            f"model: {config.model.name}, optimizer: {config.optimizer.name}\n"
            f"{self.table}"
        )


def prepare(config: ConfigDict, workdir: str | os.PathLike[str]) -> Run:
    """Checks all that a user can have got wrong, cheapest first, and builds the parts.

    Compiles nothing, and writes nothing but the workdir's folder itself and, where it is not yet
    there, the prepared data set.

    Raises:
      UserError: a mistake in the config, the workdir or the data.
    """
    config_lib.check_keys(config)
    config_lib.check_values(config)
    task = tasks.build(model=models.build(**config.model), **config.task)
    mesh = mesh_lib.make_mesh(config.mesh)
    mesh_lib.check_divides("config.batch_size", config.batch_size, mesh)
    mesh_lib.check_divides("config.eval.batch_size", config.eval.batch_size, mesh)
    # Durations and the optimizer need the size of the data, which may take a download: any size
    # will do to find a mistake in them first.
    resolve_optimizer(config, resolve(config, num_examples=10**6))
    folder = Workdir(workdir)
    folder.check(config)

    with naming("config.data"):
        train_set, eval_set = (
            data.load(
                config.data.name,
                split,
                data_dir=config.data.prepared_dir,
                source_dir=config.data.dir,
            )
            for split in (config.data.train_split, config.data.eval_split)
        )
    recipe = resolve(config, len(train_set))
    tx, rules = resolve_optimizer(config, recipe)
    example = train_set.gather(np.zeros(1, np.int64))
    with naming("config.model"):
        task.check(train_set)
    init = step_lib.make_init(task, tx, example)
    with naming("config.optimizer"):
        abstract_state = step_lib.abstract_state(init, mesh)
    resolve_optimizer(config, recipe, abstract_state.params)
    table = parameters.table(abstract_state.params, rules)
    folder.check_parameters(table)
    return Run(
        config, folder, mesh, task, train_set, eval_set, recipe, tx, init, abstract_state, table
    )
