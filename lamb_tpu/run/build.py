"""Builds a run from its config, after all checks that need no compilation."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from lamb_tpu import custom, data, tasks
from lamb_tpu.cluster import distributed
from lamb_tpu.config import EVAL_FREE_KEYS, FREE_KEYS
from lamb_tpu.cost import flops, topology
from lamb_tpu.errors import naming
from lamb_tpu.optim import leaves, parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.parallel.components import Averages, Carry, Skipped, StateComponent
from lamb_tpu.parallel.exchange import ShardedExchange
from lamb_tpu.parallel.exchange.residual import ResidualComponent
from lamb_tpu.parallel.layout import Layout, make_layout
from lamb_tpu.run import checks, compatibility, exchanges, identity, initial, memory, statistics
from lamb_tpu.run.combination import Combination
from lamb_tpu.run.initial import InitialWeights
from lamb_tpu.run.optimizer import Optimizer
from lamb_tpu.run.recipe import Recipe, resolve
from lamb_tpu.run.settings import settings
from lamb_tpu.spec import Config, Spec
from lamb_tpu.spec_keys import plain
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to be compiled.

    Attributes:
      folder: the workdir; None for a run that is only planned.
      plain_task: the task for use under jit; its model names no mesh axes.
      tx: the optimizer's transformation; for a changing batch size, see `optimizer_at`.
      layout: shardings of parameters and moments.
      init: creates the state before the first update, see `state.make_init`.
      abstract_state: shapes, dtypes and shardings of the state.
      metadata: parameter metadata, see `parameters.resolve`.
      table: the parameter metadata as a text table.
      leaves: report on the optimizer's update and state for each parameter.
      batch_norm: a line about the groups of BatchNorm; '' for a model without BatchNorm.
      start: source of the initial weights; None for random weights.
    """

    spec: Spec
    folder: Workdir | None
    mesh: Mesh
    task: tasks.Task
    plain_task: tasks.Task
    optimizer: Optimizer
    train_set: data.Source
    eval_set: data.Source
    recipe: Recipe
    tx: optax.GradientTransformation
    layout: Layout
    init: Callable[[jax.Array], state_lib.TrainState]
    abstract_state: state_lib.TrainState
    metadata: Any
    table: str
    leaves: leaves.Report
    batch_norm: str
    start: InitialWeights | None

    @property
    def shardings(self) -> state_lib.TrainState:
        """The sharding of each array of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def eval_batch_size(self) -> int:
        """The smaller of config.eval.batch_size and the set's size, rounded up to a multiple of shards."""
        parts = mesh_lib.num_batch_shards(self.mesh)
        return -(-min(self.spec.eval.batch_size, len(self.eval_set)) // parts) * parts

    @functools.cached_property
    def model_flops(self) -> int | None:
        """Model FLOPs of an update (`flops.training_flops`); None if they cannot be counted."""
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

        Trees are sorted alphabetically, which puts layer_10 before layer_2.
        """
        batch = {
            name: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
            for name, spec in self.train_set.element_spec.items()
        }
        paths: list[str] = []

        # Walk while `init` is traced: JAX sorts the keys of a traced function's result.
        def walk(tree: PyTree, path: str = "") -> None:
            for name, value in tree.items():
                if isinstance(value, Mapping):
                    walk(value, f"{path}{name}/")
                else:
                    paths.append(f"{path}{name}")

        def init(key: jax.Array, batch: Any) -> None:
            params = self.task.init(key, batch)["params"]
            if isinstance(params, Mapping):  # the parameters of a custom model may be a list
                walk(params)

        jax.eval_shape(init, jax.random.key(0), batch)  # calls `walk` and computes nothing
        known = parameters.leaf_paths(self.abstract_state.params)
        # `walk` handles only mappings. With other containers, fall back to the tree's order.
        return paths if sorted(paths) == sorted(known) else known

    @property
    def peak_flops(self) -> float | None:
        """The total peak FLOP/s of all devices; None if unknown."""
        devices = self.mesh.devices
        peak = topology.peak_flops(devices.flat[0].device_kind)
        return peak and peak * devices.size

    @property
    def tokens_per_update(self) -> int:
        """Number of tokens in config.batch_size examples, with padding; 0 if the data is not text."""
        return self.spec.batch_size * data.tokens_of(self.train_set.element_spec)

    def amounts(self) -> dict[str, float]:
        """Returns the work in config.batch_size examples, for each rate of `throughput.Throughput`."""
        amounts: dict[str, float] = {"examples_per_second": self.spec.batch_size}
        if self.tokens_per_update:
            amounts["tokens_per_second"] = self.tokens_per_update
        if self.peak_flops and self.model_flops:
            amounts["mfu"] = self.model_flops / self.peak_flops
        return amounts

    @property
    def parts(self) -> tuple[StateComponent, ...]:
        """The components of the state besides parameters, model state and optimizer state."""
        return state_components(
            self.spec, self.task, self.mesh, self.exchange, self.abstract_state.params
        )

    @functools.cached_property
    def exchange(self) -> ShardedExchange | None:
        """The exchange of gradients; None under jit, where the compiler inserts the collectives."""
        stacked = self.task.model.stacked
        return exchanges.make_sharded(self.spec, self.layout, self.abstract_state.params, stacked)

    def stage(self, update: int, exchange: ShardedExchange | None = None) -> step_lib.Stage:
        """Returns the stage of the update that follows `update` completed updates."""
        return step_lib.stage_at(self.tx, exchange or self.exchange, update)

    def optimizer_at(self, rate: jax.Array) -> optax.GradientTransformation:
        """Returns the optimizer with a given learning rate if the batch size changes; otherwise `tx`.

        The states of this optimizer and of `tx` have the same structure.
        """
        return self.tx if self.recipe.path is None else self.make_optimizer(self.recipe, rate)

    def make_optimizer(
        self, recipe: Recipe, rate: jax.typing.ArrayLike = math.nan
    ) -> optax.GradientTransformation:
        """Returns the optimizer with the learning rate of a recipe, see `Optimizer.make`."""
        named = self.spec.parallel.backend == "shard_map"
        layout = self.layout if named else None
        return self.optimizer.make(recipe, self.abstract_state.params, layout, rate)

    def saved_state(self, shapes: Mapping[str, Any]) -> state_lib.TrainState:
        """Returns the abstract state for reading a checkpoint whose arrays have these shapes."""
        return state_lib.saved(self.abstract_state, shapes, self.parts)

    def first_state(self) -> state_lib.TrainState:
        """Creates the state before the first update, with the run's shardings."""
        key = jax.random.key(self.spec.seed)
        given = self.start.values(self.abstract_state) if self.start else {}
        # Without out_shardings, jit puts scalars, such as the optimizer's count, on one device, and
        # the step over the mesh rejects them.
        return jax.jit(self.init, out_shardings=self.shardings)(key, given)

    def make_train_step(
        self, update: int = 0, exchange: ShardedExchange | None = None, **options: Any
    ) -> jax.stages.Wrapped:
        """Returns the step of the update that follows `update` completed updates.

        `exchange` is the run's exchange with values chosen from the state; None: the initial exchange.
        `options` are further arguments of `step.make_train_step`.
        """
        spec, parallel = self.spec, self.spec.parallel
        return step_lib.make_train_step(
            self.task,
            self.tx,
            self.layout,
            self.shardings,
            parallel.backend,
            self.exchange,
            self.stage(update, exchange),
            accumulation_steps=spec.accumulation_steps,
            parts=self.parts,
            skip_nonfinite=spec.guards.max_skipped > 0,
            **options,
        )

    def local_rows(self) -> np.ndarray:
        """Returns the positions in a batch that this process reads for `shard_batch`."""
        return rows_lib.local_examples(
            self.spec.batch_size, self.mesh, self.spec.accumulation_steps
        )

    def shard_batch(self, batch: data.Batch, updates: int = 1) -> dict[str, jax.Array]:
        """Splits a batch over the mesh, given the rows of `local_rows`; see `rows.shard_batch`."""
        return rows_lib.shard_batch(batch, self.spec.batch_size, self.mesh, updates)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of a training batch."""
        return self.abstract_rows(self.spec.batch_size, self.train_set.element_spec)

    def abstract_batches(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Returns an abstract training batch for each bucket of the training set."""
        source = self.train_set
        if source.buckets is None:
            return [self.abstract_batch()]
        example = source.gather(np.zeros(1, np.int64))
        return [
            self.abstract_like(source.trim(example, int(number)))
            for number in np.unique(source.buckets)
        ]

    def abstract_like(self, batch: data.Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of a training batch with the fields of `batch`."""
        fields = {
            name: data.FieldSpec(values.shape[1:], values.dtype) for name, values in batch.items()
        }
        return self.abstract_rows(self.spec.batch_size, fields)

    def abstract_eval_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of an evaluation batch, with its mask."""
        mask = {"mask": data.FieldSpec((), np.dtype(np.float32))}
        return self.abstract_rows(self.eval_batch_size, self.eval_set.element_spec | mask)

    def abstract_rows(
        self, rows: int, spec: Mapping[str, data.FieldSpec]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of a batch of `rows` rows with the fields in `spec`."""
        sharding = mesh_lib.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((rows, *value.shape), value.dtype, sharding=sharding)
            for name, value in spec.items()
        }


def state_components(
    spec: Spec, task: tasks.Task, mesh: Mesh, exchange: ShardedExchange | None, params: Params
) -> tuple[StateComponent, ...]:
    """Returns the components of the state besides parameters, model state and optimizer state."""
    parts: tuple[StateComponent, ...] = (Averages(spec.ema.decay), Skipped())
    if exchange is not None and exchange.keeps_residual:
        parts += (ResidualComponent(exchange, params),)
    if (shape := task.model.carry_shape) is not None:
        parts += (Carry(shape, spec.batch_size, spec.accumulation_steps, mesh),)
    return parts


@custom.calling("making the run")
def prepare(
    config: Config,
    workdir: str | os.PathLike[str] | None,
    devices: Sequence[jax.Device] | None = None,
    training: bool = True,
    load: Callable[..., data.Source] | None = None,
) -> Run:
    """Builds a run after checking config, workdir and data, cheapest checks first.

    Compiles nothing. Creates only the workdir and, if missing, the prepared data set.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      workdir: folder of the run; None to plan a run or to evaluate initial weights.
      devices: devices of the mesh; None: all.
      training: False for an evaluation. The evaluation split may then differ from that of the run,
        and the training batch need not be divisible by the number of devices.
      load: loads the data sets; None: `data.load`. A plan uses `data.load_shapes`.

    Raises:
      UserError: the config, the workdir or the data is wrong.
    """
    parts = settings(config, devices, training)
    spec, task = parts.spec, parts.task
    folder, start = _open(spec, workdir, training)
    train_set, eval_set = _load(spec, folder, start, load or data.load)
    # Durations need the true number of examples.
    recipe = resolve(spec, len(train_set), start.updates_before if start else 0)
    with naming("config.model"):
        task.check(train_set)
    parts = _with_layout(dataclasses.replace(parts, train_set=train_set))
    parts, init, abstract_state = _with_state(parts, recipe)
    _check_step(parts, recipe, abstract_state)
    optimizer = parts.optimizer
    report = leaves.report(
        optimizer.name, parts.state.opt_state, parts.params, optimizer.rules, optimizer.arguments
    )
    # A resumed run must have the parameters and the vocabulary that its folder records.
    if folder is not None:
        folder.check_parameters(report.table())
        folder.check_text(train_set)
    if start is not None:
        start = initial.check(start, spec, parts.state, train_set)
    return Run(
        spec=spec,
        folder=folder,
        mesh=parts.mesh,
        task=task,
        plain_task=parts.plain_task,
        optimizer=optimizer,
        train_set=train_set,
        eval_set=eval_set,
        recipe=recipe,
        tx=parts.tx,
        layout=parts.layout,
        init=init,
        abstract_state=abstract_state,
        metadata=parts.metadata,
        table=report.table(full=False),
        leaves=report,
        batch_norm=parts.batch_norm,
        start=start,
    )


def _open(
    spec: Spec, workdir: str | os.PathLike[str] | None, training: bool
) -> tuple[Workdir | None, InitialWeights | None]:
    folder = None if workdir is None else Workdir(workdir)
    if folder is not None:
        # A folder may be unwritable on only one host.
        with distributed.together():
            folder.check(spec, FREE_KEYS if training else EVAL_FREE_KEYS, writes=training)
    if training:
        return folder, initial.find(spec, folder)
    return folder, initial.of_weights(spec) if folder is None and spec.init_from else None


def _load(
    spec: Spec,
    folder: Workdir | None,
    start: InitialWeights | None,
    load: Callable[..., data.Source],
) -> tuple[data.Source, data.Source]:
    options = initial.data_options(plain(spec.data.options), folder, start)
    # Data may be damaged or missing on only one host.
    with distributed.together(), naming("config.data"):
        train_set, eval_set = (
            load(
                spec.data.name,
                split,
                data_dir=spec.data.prepared_dir,
                source_dir=spec.data.dir,
                options=options,
                seed=spec.seed,
                training=is_train,
                batch_size=spec.batch_size,
            )
            for split, is_train in ((spec.data.train_split, True), (spec.data.eval_split, False))
        )
        data.check_same_text(train_set, eval_set)
    if custom.is_custom(spec.data.name):
        data.check_same_form(train_set, eval_set)
    identity.check_data(train_set, eval_set)
    return train_set, eval_set


def _with_layout(parts: Combination) -> Combination:
    """Adds shapes, metadata and shardings of the parameters."""
    compatibility.check(parts, "data")
    spec, task, mesh = parts.spec, parts.task, parts.mesh
    # Read one example for its shapes. Neither the example nor the parameters reach a device.
    example = parts.train_set.gather(np.zeros(1, np.int64))
    params = checks.abstract_params(spec.model.name, task, example)
    with naming("config.optimizer"):
        metadata = parameters.resolve(params, parts.optimizer.rules)
    axes: tuple[str, ...] = ()
    if (heads := task.model.num_heads) is not None:
        axes = rules_lib.sequence_axes(mesh, heads, example["input_ids"].shape[1])
    layout = make_layout(
        params, mesh, metadata, spec.parallel.rules, spec.parallel.optimizer_state, axes
    )
    if parts.named:
        rules_lib.check_named(layout.params, mesh, metadata)
    parts = dataclasses.replace(
        parts, example=example, params=params, metadata=metadata, layout=layout
    )
    compatibility.check(parts, "layout")
    return parts


def _with_state(
    parts: Combination, recipe: Recipe
) -> tuple[Combination, Callable[..., state_lib.TrainState], state_lib.TrainState]:
    """Adds the optimizer and the state; also returns `init` and `abstract_state` of `Run`."""
    spec, task, layout = parts.spec, parts.task, parts.layout
    tx = parts.optimizer.make(recipe, parts.params, layout if parts.named else None)
    parts = dataclasses.replace(parts, tx=tx)
    compatibility.check(parts, "optimizer")
    exchange = exchanges.make_sharded(spec, layout, parts.params, task.model.stacked)
    others = state_components(spec, task, parts.mesh, exchange, parts.params)
    init = state_lib.make_init(task, tx, parts.example, others, spec.prng)
    with naming("config.optimizer"):
        state = jax.eval_shape(init, jax.random.key(0))
    shardings = state_lib.state_shardings(state, tx, layout, others)
    parts = dataclasses.replace(parts, state=state)
    return parts, init, state_lib.with_shardings(state, shardings)


def _check_step(parts: Combination, recipe: Recipe, abstract_state: state_lib.TrainState) -> None:
    spec, state = parts.spec, parts.state
    # An evaluation needs no memory for a training batch.
    rows = recipe.largest_batch if parts.training else 1
    memory.check_memory(
        abstract_state, parts.mesh, rows // jax.process_count(), parts.train_set.element_spec
    )
    # The test suite traces shipped optimizers under jit. Trace the others here: custom optimizers, and
    # all optimizers under shard_map.
    if parts.named or parts.optimizer.is_custom:
        layout = parts.layout if parts.named else None
        with naming("config.optimizer"):
            state_lib.check_update(parts.tx, state.params, state.opt_state, layout)
    if not parts.training:
        return
    compatibility.check(parts, "state")
    statistics.check_state(parts.asked, state)
    in_microbatches = parts.rule is not None or bool(parts.asked)
    # Under jit without microbatches, each layer sees the full batch, so skip the check.
    if parts.named or spec.accumulation_steps > 1 or in_microbatches:
        checks.check_statistics(spec, parts.plain_task, state, parts.train_set, in_microbatches)
