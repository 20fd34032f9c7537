"""A run built from its config, with all checks before anything compiles.

`train`, `evaluate` and `plan` start here.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu import data, models, own, tasks
from lamb_tpu.cluster import distributed
from lamb_tpu.cost import flops, topology
from lamb_tpu.data.text import saved
from lamb_tpu.errors import UserError
from lamb_tpu.optim import factory, leaves, parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.parallel.exchange import Placed
from lamb_tpu.parallel.layout import Layout, make_layout
from lamb_tpu.parallel.parts import Averages, Carry, Skipped, StatePart
from lamb_tpu.run import checks, exchanges, identity, initial, memory, statistics
from lamb_tpu.run.initial import Start
from lamb_tpu.run.recipe import Recipe, naming, optimizer_of, resolve, resolve_optimizer
from lamb_tpu.store.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Run:
    """A config made concrete.

    Attributes:
      config: the config.
      folder: the workdir; None for a run that is only planned.
      mesh: the mesh over all devices.
      task: the learning problem, with its model.
      train_set, eval_set: the data sets.
      recipe: durations in updates, and the learning rate.
      tx: the optimizer.
      layout: shardings of parameters and moments.
      init: makes the state before the first update, see `state.make_init`.
      abstract_state: shapes, dtypes and shardings of the state.
      facts: the facts of every parameter, see `parameters.resolve`.
      table: the facts as text.
      leaves: the optimizer's update and state of every parameter.
      batch_norm: a line about the groups of BatchNorm; '' for a model without BatchNorm.
      start: source of the initial weights; None: they are random.
    """

    config: ConfigDict
    folder: Workdir | None
    mesh: Mesh
    task: tasks.Task
    train_set: data.Source
    eval_set: data.Source
    recipe: Recipe
    tx: optax.GradientTransformation
    layout: Layout
    init: Callable[[jax.Array], state_lib.TrainState]
    abstract_state: state_lib.TrainState
    facts: Any
    table: str
    leaves: leaves.Report
    batch_norm: str
    start: Start | None

    @property
    def shardings(self) -> state_lib.TrainState:
        """The sharding of each array of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def eval_batch_size(self) -> int:
        """Batch size of an evaluation: the config's, at most the number of examples, rounded up.

        It is rounded up to a multiple of the number of batch shards. No metric depends on it.
        """
        parts = mesh_lib.num_batch_shards(self.mesh)
        return -(-min(self.config.eval.batch_size, len(self.eval_set)) // parts) * parts

    @functools.cached_property
    def plain_task(self) -> tasks.Task:
        """The task for use under jit; the model of `task` may name axes of shard_map."""
        return tasks.build(model=models.build(**self.config.model), **self.config.task)

    @functools.cached_property
    def model_flops(self) -> int | None:
        """Model FLOPs of an update, see `flops.training_flops`; None if they cannot be counted."""
        task, state, batch = self.plain_task, self.abstract_state, self.abstract_batch()
        try:
            return flops.training_flops(
                task.loss, state.params, state.model_state, batch, state.key
            )
        except ValueError:
            return None

    @functools.cached_property
    def parameter_order(self) -> list[str]:
        """Paths of the parameters in the order in which the network creates them.

        A tree's own order is alphabetical, with layer_10 before layer_2.
        """
        batch = {
            name: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
            for name, spec in self.train_set.element_spec.items()
        }
        paths: list[str] = []

        # The walk happens while `init` is traced, because JAX sorts the keys of a traced function's
        # result.
        def walk(tree: Any, path: str = "") -> None:
            for name, value in tree.items():
                if isinstance(value, Mapping):
                    walk(value, f"{path}{name}/")
                else:
                    paths.append(f"{path}{name}")

        def init(key: jax.Array, batch: Any) -> None:
            params = self.task.init(key, batch)["params"]
            if isinstance(params, Mapping):  # a user's own may be a list
                walk(params)

        # Only for `walk`: nothing is computed.
        jax.eval_shape(init, jax.random.key(0), batch)
        known = parameters.leaf_paths(self.abstract_state.params)
        # `walk` knows mappings only. For other containers the tree's own order has to do.
        return paths if sorted(paths) == sorted(known) else known

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of all devices together; None if unknown."""
        devices = self.mesh.devices
        peak = topology.peak_flops(devices.flat[0].device_kind)
        return peak and peak * devices.size

    @property
    def tokens_per_update(self) -> int:
        """Number of tokens in config.batch_size of text, padding included; 0 for other data."""
        return self.config.batch_size * data.tokens_of(self.train_set.element_spec)

    def amounts(self) -> dict[str, float]:
        """Returns what config.batch_size adds to each rate of `watch.throughput.Throughput`."""
        amounts: dict[str, float] = {"examples_per_second": self.config.batch_size}
        if self.tokens_per_update:
            amounts["tokens_per_second"] = self.tokens_per_update
        if self.peak_flops and self.model_flops:
            amounts["mfu"] = self.model_flops / self.peak_flops
        return amounts

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The parts of the state beside parameters, model state and optimizer state."""
        return state_parts(
            self.config, self.task, self.mesh, self.exchange, self.abstract_state.params
        )

    @functools.cached_property
    def exchange(self) -> Placed | None:
        """What gradients are sent as; None under jit, where the compiler sends them."""
        stacked = self.task.model.stacked
        return exchanges.placed(self.config, self.layout, self.abstract_state.params, stacked)

    def stage(self, update: int, exchange: Placed | None = None) -> step_lib.Stage:
        """Returns the stage of the update after `update` completed ones, as `make_train_step`'s."""
        return step_lib.stage_at(self.tx, exchange or self.exchange, update)

    def saved_state(self, shapes: Mapping[str, Any]) -> state_lib.TrainState:
        """Returns shapes, dtypes and shardings in which to read a checkpoint of other devices.

        Args:
          shapes: of the checkpoint, see `Checkpoints.shapes`.
        """
        return state_lib.saved(self.abstract_state, shapes, self.parts)

    def first_state(self) -> state_lib.TrainState:
        """Returns the state before the first update, created on the devices where it stays."""
        key = jax.random.key(self.config.seed)
        given = self.start.values(self.abstract_state) if self.start else {}
        # Without out_shardings jit would put scalars, such as the optimizer's count, on one device,
        # and a step over the mesh would refuse them.
        return jax.jit(self.init, out_shardings=self.shardings)(key, given)

    def make_train_step(
        self, update: int = 0, exchange: Placed | None = None
    ) -> jax.stages.Wrapped:
        """Returns the training step, `(state, batch) -> (state, sums)`, compiled at first call.

        It is of the stage of the update after `update` completed ones, see `stage`.

        Args:
          update: number of completed updates.
          exchange: the run's, with what it has chosen from the state; None: as it begins.
        """
        config, parallel = self.config, self.config.parallel
        return step_lib.make_train_step(
            self.task,
            self.tx,
            self.layout,
            self.shardings,
            parallel.backend,
            self.exchange,
            self.stage(update, exchange),
            accumulation_steps=config.accumulation_steps,
            parts=self.parts,
            skip_nonfinite=config.guards.max_skipped > 0,
        )

    def local_rows(self) -> np.ndarray:
        """Returns the rows of a training batch that this process reads, as `shard_batch` needs."""
        # Places of the batch in the order in which shards and microbatches cut it.
        order = mesh_lib.microbatch_order(
            self.config.batch_size,
            mesh_lib.num_batch_shards(self.mesh),
            self.config.accumulation_steps,
        )
        return order[mesh_lib.local_rows(self.config.batch_size, self.mesh)]

    def shard_batch(self, batch: data.Batch) -> dict[str, jax.Array]:
        """Returns a training batch, split over the mesh, from the rows of `local_rows`."""
        return mesh_lib.shard_batch(batch, self.config.batch_size, self.mesh)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a training batch."""
        return self.abstract_rows(self.config.batch_size, self.train_set.element_spec)

    def abstract_batches(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Training batches as `abstract_batch`, one for each bucket of the training set."""
        source = self.train_set
        if source.buckets is None:
            return [self.abstract_batch()]
        example = source.gather(np.zeros(1, np.int64))
        trimmed = [source.trim(example, int(number)) for number in np.unique(source.buckets)]
        return [
            self.abstract_rows(
                self.config.batch_size,
                {
                    name: data.FieldSpec(values.shape[1:], values.dtype)
                    for name, values in batch.items()
                },
            )
            for batch in trimmed
        ]

    def abstract_eval_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of an evaluation batch, with its mask."""
        mask = {"mask": data.FieldSpec((), np.dtype(np.float32))}
        return self.abstract_rows(self.eval_batch_size, self.eval_set.element_spec | mask)

    def abstract_rows(
        self, rows: int, spec: Mapping[str, data.FieldSpec]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a batch of so many rows with these fields."""
        sharding = mesh_lib.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((rows, *value.shape), value.dtype, sharding=sharding)
            for name, value in spec.items()
        }


def state_parts(
    config: ConfigDict, task: tasks.Task, mesh: Mesh, exchange: Placed | None, params: Any
) -> tuple[StatePart, ...]:
    """Returns the parts of a run's state beside parameters, model state and optimizer state."""
    parts: tuple[StatePart, ...] = (Averages(config.ema.decay), Skipped())
    parts += exchanges.parts(exchange, params)
    if task.model.carry_shape is None:
        return parts
    rows, steps = config.batch_size, config.accumulation_steps
    return (*parts, Carry(task.model.carry_shape, rows, steps, mesh))


class Settings(NamedTuple):
    """The parts of a run that need no data.

    Attributes:
      mesh: the mesh over all devices.
      task: the learning problem, with its model.
      rules: of the parameters' facts.
      batch_norm: see `Run`.
    """

    mesh: Mesh
    task: tasks.Task
    rules: parameters.Rules
    batch_norm: str


def settings(
    config: ConfigDict, devices: Sequence[jax.Device] | None = None, training: bool = True
) -> Settings:
    """Builds the parts of a run that need no data, with all checks of the config that need none.

    Args:
      config, devices, training: see `prepare`.

    Raises:
      UserError: the config has a mistake.
    """
    config_lib.check_keys(config)
    config_lib.check_values(config)
    if config.phases:
        raise UserError(
            f"config.phases has {', '.join(sorted(config.phases))}, each of them a run of its own "
            "in a folder of its name; give that folder as --workdir, and if --config is needed, "
            "one phase's (often the config's argument phase=N)"
        )
    # Mesh, model and task. Inside shard_map BatchNorm and the optimizer must know the mesh axes.
    named = config.parallel.backend == "shard_map"
    mesh = mesh_lib.make_mesh(config.mesh, devices)
    batch_norm = ""
    if training:
        group_replicas, batch_norm = checks.check_batch(config, mesh)
        # If several devices share a group of BatchNorm, they have to be neighbours.
        mesh = mesh_lib.make_mesh(config.mesh, devices, group_replicas)
    if named and set(mesh.shape) - set(mesh_lib.BATCH_AXES):
        raise UserError(
            "config.parallel.backend is 'shard_map', which splits the batch alone; "
            "config.mesh.model and config.mesh.sequence need 'jit'"
        )
    axes = mesh_lib.batch_axes(mesh) if named else ()
    task = tasks.build(model=models.build(axis_name=axes, **config.model), **config.task)
    if training:
        checks.check_pairs(config, mesh, task)
    # Durations and the optimizer depend on the size of the data, which may need a download. Any
    # size serves to find mistakes in them before that.
    exchanges.check(config, mesh, training)
    recipe = resolve(config, num_examples=10**6)
    if recipe.rule is not None and training:
        checks.check_changing(config, task, mesh, recipe.rule)
    if training:
        statistics.check(config, mesh, task, recipe.path is not None, group_replicas)
    _, rules = resolve_optimizer(config, recipe)
    for number, rule in enumerate(config.parallel.rules):
        rules_lib.check_rule(number, rule)
    return Settings(mesh, task, rules, batch_norm)


@own.calling("making the run")
def prepare(
    config: ConfigDict,
    workdir: str | os.PathLike[str] | None,
    devices: Sequence[jax.Device] | None = None,
    training: bool = True,
    load: Callable[..., data.Source] | None = None,
) -> Run:
    """Builds the parts of a run, with all checks of config, workdir and data, cheapest first.

    Nothing is compiled. Nothing is written but the workdir's folder itself and, if it is missing,
    the prepared data set.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      workdir: folder of the run; None for a run that is only planned, and for an evaluation of
        initial weights.
      devices: devices of the mesh; None: all.
      training: False for an evaluation. It may have another evaluation split than the run, and a
        number of devices that does not divide the training batch.
      load: loads the data sets; None is `data.load`. A plan has `data.load_shapes`.

    Raises:
      UserError: the config, the workdir or the data has a mistake.
    """
    mesh, task, rules, batch_norm = settings(config, devices, training)
    named = config.parallel.backend == "shard_map"
    # The folder and the initial weights, also before the data.
    folder = None if workdir is None else Workdir(workdir)
    if folder is not None:
        free_keys = config_lib.FREE_KEYS if training else config_lib.EVAL_FREE_KEYS
        # A folder may be unwritable, and data damaged or missing, on one host alone.
        with distributed.together():
            folder.check(config, free_keys, writes=training)
    start = None
    if training:
        start = initial.find(config, folder)
    elif folder is None and config.init_from:
        start = initial.of_weights(config)

    # The data.
    options = _data_options(config, folder, start)
    with distributed.together(), naming("config.data"):
        train_set, eval_set = (
            (load or data.load)(
                config.data.name,
                split,
                data_dir=config.data.prepared_dir,
                source_dir=config.data.dir,
                options=options,
                seed=config.seed,
                training=is_train,
                batch_size=config.batch_size,
            )
            for split, is_train in (
                (config.data.train_split, True),
                (config.data.eval_split, False),
            )
        )
        data.check_same_text(train_set, eval_set)
    identity.check_data(train_set, eval_set)
    # Durations with the true number of examples.
    recipe = resolve(config, len(train_set), start.updates_before if start else 0)
    with naming("config.model"):
        task.check(train_set)
    # One example, for its shapes: neither it nor the parameters reach a device.
    example = train_set.gather(np.zeros(1, np.int64))
    params = jax.eval_shape(task.init, jax.random.key(0), example)["params"]
    with naming("config.optimizer"):
        facts = parameters.resolve(params, rules)
    checks.check_stacked(task.model.stacked, facts)
    heads = task.model.num_heads
    activation_axes: tuple[str, ...] = ()
    if heads is not None:
        activation_axes = rules_lib.sequence_axes(mesh, heads, example["input_ids"].shape[1])
    layout = make_layout(
        params, mesh, facts, config.parallel.rules, config.parallel.optimizer_state, activation_axes
    )
    if named:
        rules_lib.check_named(layout.params, mesh, facts)
        checks.check_split(config, params, layout.axis_name)
    # The optimizer, and its state as shapes, dtypes and shardings.
    tx = make_optimizer(config, recipe, params, layout)
    exchanges.check_optimizer(config, tx, mesh)
    exchange = exchanges.placed(config, layout, params, task.model.stacked)
    parts = state_parts(config, task, mesh, exchange, params)
    init = state_lib.make_init(task, tx, example, parts, config.prng)
    with naming("config.optimizer"):
        abstract = jax.eval_shape(init, jax.random.key(0))
    places = state_lib.state_shardings(abstract, tx, layout, parts)
    placed = state_lib.with_shardings(abstract, places)
    # An evaluation holds no batch of training.
    rows = recipe.largest_batch if training else 1
    memory.check_memory(placed, mesh, rows // jax.process_count(), train_set.element_spec)
    # The tests have traced the shipped optimizers under jit.
    if named or own.is_own(config.optimizer.name):
        with naming("config.optimizer"):
            state_lib.check_update(
                tx, abstract.params, abstract.opt_state, layout if named else None
            )
    if training and recipe.path is not None:
        checks.check_changing_data(train_set)
    if training:
        statistics.check_state(config, abstract, train_set)
    in_microbatches = recipe.path is not None or bool(statistics.statistics_of(config))
    # Under jit without microbatches every layer sees the whole batch.
    if training and (named or config.accumulation_steps > 1 or in_microbatches):
        checks.check_statistics(config, abstract, train_set, in_microbatches)
    optimizer = config.optimizer.to_dict() | {"name": optimizer_of(config.optimizer.name)}
    report = leaves.report(
        config.optimizer.name, abstract.opt_state, params, rules, factory.arguments_of(optimizer)
    )
    # A folder that is used again has a record of its parameters and its vocabulary.
    if folder is not None:
        folder.check_parameters(report.table())
        folder.check_text(train_set)
    if start is not None:
        start = initial.check(start, config, abstract, train_set)
    return Run(
        config,
        folder,
        mesh,
        task,
        train_set,
        eval_set,
        recipe,
        tx,
        layout,
        init,
        placed,
        facts,
        report.table(full=False),
        report,
        batch_norm,
        start,
    )


def make_optimizer(
    config: ConfigDict, recipe: Recipe, params: Any, layout: Layout
) -> optax.GradientTransformation:
    """Returns the config's optimizer as the step of its backend needs it.

    Args:
      config: a config.
      recipe: its durations and learning rate.
      params: the parameters, or their shapes and dtypes.
      layout: the shardings of parameters and moments.

    Raises:
      UserError: see `recipe.resolve_optimizer`.
    """
    split = None
    if config.parallel.backend == "shard_map":
        # A user's own optimizer gets only the axes; a shipped one also the dimension they split.
        split = layout.axis_name if own.is_own(config.optimizer.name) else layout.update_spec
    return resolve_optimizer(config, recipe, params, split)[0]


def _data_options(
    config: ConfigDict, folder: Workdir | None, start: Start | None
) -> dict[str, Any]:
    """Returns config.data.options; an empty vocabulary becomes that of the initial weights."""
    options = config.data.options.to_dict()
    if options.get("vocab") == "":
        beside = [] if folder is None else [folder.path]  # has the vocabulary the run began with
        beside += [start.weights.folder] if start is not None and start.weights else []
        options["vocab"] = next(
            (str(path) for path in beside if (path / saved.VOCABULARY).exists()), ""
        )
    return options
