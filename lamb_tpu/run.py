"""Everything a run needs before its first update, checked; train, evaluate and plan start here."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu import data, flops, initial, memory, models, tasks, terminal, topology
from lamb_tpu.data.text import saved
from lamb_tpu.errors import UserError
from lamb_tpu.initial import Start
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel import statistics
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.recipe import Recipe, check_split, naming, resolve, resolve_optimizer
from lamb_tpu.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Run:
    """A config made concrete.

    Attributes:
      config: the config.
      folder: the workdir; None for a run that is only planned.
      mesh: over all devices.
      task: the learning problem, with its model.
      train_set, eval_set: the data.
      recipe: durations in updates, and the learning rate.
      tx: the optimizer.
      layout: where parameters and moments live.
      init: makes the state before the first update, see `state.make_init`.
      abstract_state: its shapes, dtypes and shardings.
      facts: of every parameter, see `parameters.resolve`.
      table: the same as text.
      batch_norm: a line about the groups of BatchNorm; '' for a model without.
      start: where the first weights come from; None: from the seed.
    """

    config: ConfigDict
    folder: Workdir | None
    mesh: Mesh
    task: tasks.Task
    train_set: data.Source
    eval_set: data.Source
    recipe: Recipe
    tx: optax.GradientTransformation
    layout: state_lib.Layout
    init: Callable[[jax.Array], state_lib.TrainState]
    abstract_state: state_lib.TrainState
    facts: Any
    table: str
    batch_norm: str
    start: Start | None

    @property
    def shardings(self) -> state_lib.TrainState:
        """Where each array of the state lives."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def eval_batch_size(self) -> int:
        """The config's, or all examples where they are fewer, rounded up to what the mesh divides.

        No metric depends on it.
        """
        parts = mesh_lib.num_batch_shards(self.mesh)
        return -(-min(self.config.eval.batch_size, len(self.eval_set)) // parts) * parts

    @functools.cached_property
    def model_flops(self) -> int | None:
        """Of an update, see `flops.training_flops`; None where they cannot be told."""
        # Made anew, because nothing here binds the axes that the model names inside shard_map.
        model = models.build(**self.config.model)
        task, state = tasks.build(model=model, **self.config.task), self.abstract_state
        batch = self.abstract_batch()
        try:
            return flops.training_flops(
                task.loss, state.params, state.model_state, batch, state.key
            )
        except ValueError:
            return None

    @functools.cached_property
    def parameter_order(self) -> list[str]:
        """Paths of the parameters in the order in which the network makes them.

        A tree's own order is that of the alphabet, where layer_10 comes before layer_2.
        """
        batch = {name: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
                 for name, spec in self.train_set.element_spec.items()}
        paths: list[str] = []

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

        jax.eval_shape(init, jax.random.key(0), batch)
        known = parameters.leaf_paths(self.abstract_state.params)
        return paths if sorted(paths) == sorted(known) else known

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of all devices together; None where not known."""
        devices = self.mesh.devices
        peak = topology.peak_flops(devices.flat[0].device_kind)
        return peak and peak * devices.size

    def amounts(self) -> dict[str, float]:
        """What an update adds to each rate of `throughput.Throughput`."""
        amounts: dict[str, float] = {"examples_per_second": self.config.batch_size}
        if "input_ids" in self.train_set.element_spec:
            length = math.prod(self.train_set.element_spec["input_ids"].shape)
            amounts["tokens_per_second"] = self.config.batch_size * length
        if self.peak_flops and self.model_flops:
            amounts["mfu"] = self.model_flops / self.peak_flops
        return amounts

    def first_state(self) -> state_lib.TrainState:
        """The state before the first update, made where it will stay."""
        key = jax.random.key(self.config.seed)
        given = self.start.values(self.abstract_state) if self.start else {}
        return jax.jit(self.init, out_shardings=self.shardings)(key, given)

    def make_train_step(self) -> step_lib.Update:
        """The step that trains, `(state, batch) -> (state, sums)`, compiled at its first call."""
        config, parallel = self.config, self.config.parallel
        return step_lib.make_train_step(
            self.task,
            self.tx,
            self.layout,
            self.shardings,
            parallel.backend,
            parallel.gradient_dtype,
            accumulation_steps=config.accumulation_steps,
            ema_decay=config.ema.decay,
            skip_nonfinite=config.guards.max_skipped > 0,
        )

    def local_rows(self) -> np.ndarray:
        """The rows of a training batch that this process reads, in the order of `shard_batch`."""
        order = mesh_lib.microbatch_order(
            self.config.batch_size, mesh_lib.num_batch_shards(self.mesh),
            self.config.accumulation_steps,
        )
        return order[mesh_lib.local_rows(self.config.batch_size, self.mesh)]

    def shard_batch(self, batch: data.Batch) -> dict[str, jax.Array]:
        """A training batch over the mesh, from the rows of it that `local_rows` tells."""
        return mesh_lib.shard_batch(batch, self.config.batch_size, self.mesh)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a training batch."""
        return self._abstract_rows(self.config.batch_size, self.train_set.element_spec)

    def abstract_eval_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The same of an evaluation's, with its mask."""
        mask = {"mask": data.FieldSpec((), np.dtype(np.float32))}
        return self._abstract_rows(self.eval_batch_size, self.eval_set.element_spec | mask)

    def _abstract_rows(
        self, rows: int, spec: Mapping[str, data.FieldSpec]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        sharding = mesh_lib.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((rows, *value.shape), value.dtype, sharding=sharding)
            for name, value in spec.items()
        }

    def describe(self) -> str:
        """What was resolved, for the person at the terminal: at most 80 columns wide.

        Where there is a folder, the table of parameters stays in its file if it would push the
        settings off a screen of 24 rows, or is too wide.
        """
        config, state, places = self.config, self.abstract_state, self.shardings
        devices = self.mesh.devices.flat
        shape = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        lines = [
            f"mesh: {shape} over {len(devices)} {devices[0].device_kind} device(s) "
            f"in {len({device.process_index for device in devices})} process(es), "
            f"collectives by {config.parallel.backend}",
            rules_lib.describe(
                state.params, places.params, config.parallel.rules,
                {
                    "optimizer state": (state.opt_state, places.opt_state),
                    "averages": (state.ema, places.ema),
                },
            ),
            f"data: {config.data.name}, {config.data.train_split} {len(self.train_set):,} and "
            f"{config.data.eval_split} {len(self.eval_set):,} examples",
            *self.train_set.notes,
            *self.eval_set.notes,
            self.recipe.describe(),
            f"model: {config.model.name}, optimizer: {config.optimizer.name}",
            self._describe_flops(),
        ]
        if self.batch_norm:
            lines.append(self.batch_norm)
        if self.start is not None:
            lines.append(self.start.describe())
        if config.accumulation_steps > 1:
            rows = config.batch_size // config.accumulation_steps
            lines.append(f"accumulation: {config.accumulation_steps} microbatches of {rows:,}")
        if self.eval_batch_size > config.eval.batch_size:
            lines.append(
                f"evaluation: config.eval.batch_size is {config.eval.batch_size:,}; batches of "
                f"{self.eval_batch_size:,}, which the devices divide"
            )
        settings = terminal.fit("\n".join(lines))
        if self.folder is not None:
            settings = f"workdir: {self.folder.path}\n{settings}"
        *rows, totals = self.table.split("\n")
        whole = "\n".join([settings, *rows, terminal.fit(totals)])
        fits = whole.count("\n") < terminal.ROWS and max(map(len, rows)) <= terminal.COLUMNS
        if fits or self.folder is None:
            return whole
        name = self.folder.parameters.name
        return f"{settings}\n{terminal.fit(f'parameters: the table is in {name}; {totals}')}"

    def describe_read(self, training: bool = True) -> str:
        """What this process met that is out of the ordinary; '' where there is nothing.

        Args:
          training: whether the training set was read too.
        """
        read = [self.train_set, self.eval_set] if training else [self.eval_set]
        lines = [source.tally.describe() for source in read if source.tally is not None]
        lines = [line for line in lines if line]
        if lines and jax.process_count() > 1:
            lines.append(
                f"these are the pictures that process {jax.process_index()} of "
                f"{jax.process_count()} has read; the others have read others"
            )
        return "\n".join(lines)

    def counts_read(self) -> dict[str, int]:
        """The same as numbers, such as `train_bad`."""
        read = {"train": self.train_set.tally, "eval": self.eval_set.tally}
        return {
            f"{name}_{kind}": count
            for name, tally in read.items() if tally is not None
            for kind, count in tally.counts().items()
        }

    def _describe_flops(self) -> str:
        kind = self.mesh.devices.flat[0].device_kind
        needed = f"{self.model_flops:.4g}" if self.model_flops else "an unknown number of"
        peak = topology.peak_flops(kind)
        at_most = f"does at most {peak:.4g} a second" if peak else "has no known peak"
        return f"arithmetic: {needed} model FLOPs an update; a {kind} device {at_most}"


def prepare(
    config: ConfigDict,
    workdir: str | os.PathLike[str] | None,
    devices: Sequence[jax.Device] | None = None,
    training: bool = True,
) -> Run:
    """Checks all that a user can have got wrong, cheapest first, and builds the parts.

    Compiles nothing, and writes nothing but the workdir's folder itself and, where it is not yet
    there, the prepared data set.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      workdir: of the run; None for one that is only planned, and for an evaluation of the first
        weights.
      devices: of the mesh; None: all there are.
      training: False for an evaluation, which may have another evaluation split than the run, and
        devices that the training batch does not divide over.

    Raises:
      UserError: a mistake in the config, the workdir or the data.
    """
    config_lib.check_keys(config)
    config_lib.check_values(config)
    if config.phases:
        raise UserError(
            f"config.phases has {', '.join(sorted(config.phases))}, each of them a run of its own "
            "in a folder of its name; give that folder as --workdir, and where --config is wanted "
            "one phase's (often the config's argument phase=N)"
        )
    named = config.parallel.backend == "shard_map"
    mesh = mesh_lib.make_mesh(config.mesh, devices)
    batch_norm = ""
    if training:
        group_replicas, batch_norm = _check_batch(config, mesh)
        mesh = mesh_lib.make_mesh(config.mesh, devices, group_replicas)
    if named and set(mesh.shape) - set(mesh_lib.BATCH_AXES):
        raise UserError(
            "config.parallel.backend is 'shard_map', which splits the batch alone; "
            "config.mesh.model and config.mesh.sequence need 'jit'"
        )
    axes = mesh_lib.batch_axes(mesh) if named else ()
    task = tasks.build(model=models.build(axis_name=axes, **config.model), **config.task)
    if training:
        _check_pairs(config, mesh, task)
    # Durations and the optimizer need the size of the data, which may take a download: any size
    # will do to find a mistake in them first.
    resolve_optimizer(config, resolve(config, num_examples=10**6))
    for number, rule in enumerate(config.parallel.rules):
        rules_lib.check_rule(number, rule)
    folder = None if workdir is None else Workdir(workdir)
    if folder is not None:
        free_keys = config_lib.FREE_KEYS if training else config_lib.EVAL_FREE_KEYS
        folder.check(config, free_keys, writing=training)
    start = None
    if training:
        start = initial.find(config, folder)
    elif folder is None and config.init_from:
        start = initial.of_weights(config)

    options = _data_options(config, folder, start)
    with naming("config.data"):
        train_set, eval_set = (
            data.load(
                config.data.name,
                split,
                data_dir=config.data.prepared_dir,
                source_dir=config.data.dir,
                options=options,
                seed=config.seed,
                training=is_train,
            )
            for split, is_train in (
                (config.data.train_split, True), (config.data.eval_split, False),
            )
        )
        data.check_same_text(train_set, eval_set)
    recipe = resolve(config, len(train_set), start.updates_before if start else 0)
    with naming("config.model"):
        task.check(train_set)
    example = train_set.gather(np.zeros(1, np.int64))
    tx, rules = resolve_optimizer(config, recipe)
    params = _abstract(task, tx, example, config).params
    tx, _ = resolve_optimizer(config, recipe, params)
    with naming("config.optimizer"):
        facts = parameters.resolve(params, rules)
    _check_stacked(task.model.stacked, facts)
    heads = task.model.num_heads
    activation_axes = ()
    if heads is not None:
        activation_axes = rules_lib.sequence_axes(mesh, heads, example["input_ids"].shape[1])
    layout = state_lib.make_layout(
        params, mesh, facts, config.parallel.rules, config.parallel.optimizer_state, activation_axes
    )
    if named:
        rules_lib.check_named(layout.params, mesh, facts)
        check_split(config, params, layout.axis_name)
        tx, _ = resolve_optimizer(config, recipe, params, layout.axis_name)
    init = state_lib.make_init(task, tx, example, config.ema.decay > 0, config.prng)
    abstract = jax.eval_shape(init, jax.random.key(0))
    places = state_lib.state_shardings(abstract, tx, layout)
    placed = state_lib.with_shardings(abstract, places)
    rows = config.batch_size if training else 1
    memory.check_memory(placed, mesh, rows // jax.process_count(), train_set.element_spec)
    if named:
        with naming("config.optimizer"):
            state_lib.check_update(tx, abstract.params, abstract.opt_state, layout)
    if training and (named or config.accumulation_steps > 1):
        _check_statistics(config, abstract, train_set)
    table = parameters.table(params, rules)
    if folder is not None:
        folder.check_parameters(table)
        folder.check_text(train_set)
    if start is not None:
        start = initial.check(start, config, abstract, train_set)
    return Run(
        config, folder, mesh, task, train_set, eval_set, recipe, tx, layout, init,
        placed, facts, table, batch_norm, start,
    )


def _data_options(
    config: ConfigDict, folder: Workdir | None, start: Start | None
) -> dict[str, Any]:
    """config.data.options, with the vocabulary of the first weights where it is left empty."""
    options = config.data.options.to_dict()
    if options.get("vocab") == "":
        beside = [] if folder is None else [folder.path]  # those that the run began with
        beside += [start.weights.folder] if start is not None and start.weights else []
        options["vocab"] = next(
            (str(path) for path in beside if (path / saved.VOCABULARY).exists()), ""
        )
    return options


def _check_batch(config: ConfigDict, mesh: Mesh) -> tuple[int, str]:
    """Refuses a batch that does not divide; over how many devices a group of BatchNorm is spread,
    and the line about it.
    """
    parts, steps = mesh_lib.num_batch_shards(mesh), config.accumulation_steps
    over = f"the {parts} devices of config.mesh"
    if "model" in mesh.shape or "sequence" in mesh.shape:
        over = f"the {parts} parts into which config.mesh splits it"
    mesh_lib.check_divides("config.batch_size", config.batch_size, parts, over)
    if steps > 1:
        over += f" in config.accumulation_steps={steps} microbatches"
        mesh_lib.check_divides("config.batch_size", config.batch_size, parts * steps, over)
    with naming("config.model"):
        return models.batch_norm_groups(config.model, config.batch_size // steps, parts)


def _check_statistics(
    config: ConfigDict, abstract: state_lib.TrainState, train_set: data.Source
) -> None:
    """Refuses a model whose own statistics would be those of a part of the batch."""
    rows = config.batch_size // config.accumulation_steps
    batch = {
        name: jax.ShapeDtypeStruct((rows, *spec.shape), spec.dtype)
        for name, spec in train_set.element_spec.items()
    }
    # Made anew, because nothing here binds the axes that the model names inside shard_map.
    task = tasks.build(model=models.build(**config.model), **config.task)
    with naming("config.model"):
        statistics.check_statistics(
            task, abstract.params, abstract.model_state, batch, abstract.key,
            whole=config.accumulation_steps == 1,
        )


def _check_stacked(stacked: str | None, facts: Any) -> None:
    """Refuses rules that take layers which a parameter stacks for one layer.

    Args:
      stacked: of the model.
      facts: of its parameters.
    """
    if stacked is None:
        return
    for path, fact in zip(parameters.leaf_paths(facts), jax.tree.leaves(facts), strict=True):
        if re.search(stacked, path) and fact.adapt and 0 not in fact.layer_axes:
            raise UserError(
                f"config.model stacks its layers along axis 0 of {path!r}, and "
                "config.optimizer.rules give it no layer_axes, so all layers would share one trust "
                "ratio; give rules with layer_axes=(0,) for them, as "
                "lamb_tpu.models.bert_rules.PARAMETERS_SCANNED (configs/bert_pretrain.py has them "
                "by its argument scan), or set config.model.scan_layers=False"
            )


def _check_pairs(config: ConfigDict, mesh: Mesh, task: tasks.Task) -> None:
    """Refuses a batch that would tear apart the pairs of examples that a task mixes."""
    names = getattr(task, "mixed_by", ())
    if names:
        parts, steps = mesh_lib.num_batch_shards(mesh), config.accumulation_steps
        mesh_lib.check_divides(
            "config.batch_size", config.batch_size, 2 * parts * steps,
            f"the {parts} devices of config.mesh in config.accumulation_steps={steps} microbatches "
            f"of whole pairs, which config.task.{names[0]} mixes",
        )


def _abstract(
    task: tasks.Task, tx: optax.GradientTransformation, example: Any, config: ConfigDict
) -> state_lib.TrainState:
    with naming("config.optimizer"):
        return jax.eval_shape(state_lib.make_init(task, tx, example), jax.random.key(0))
