"""The table of components and settings that cannot be combined, also shown in the README.

A row has a predicate over a `Combination` and the texts of the error that rejects the config. Rows
are grouped by stage, cheapest first: a stage is checked as soon as its inputs are known.

- "seeds": the config alone, for runs side by side.
- "config": mesh, task, optimizer, batch rule, exchange and statistics; no data.
- "data": the training set.
- "layout": the parameters and their shardings.
- "optimizer": the optimizer's transformation.
- "state": the shapes of the state.

A component of another package declares its requirements as a class or function attribute:

    requires = {"ema.decay": (0.0, "which averages the weights itself")}

A config with another value of such a key is rejected. The module `checks` checks numbers, such as a
batch size that must be divisible by the number of devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from lamb_tpu import data
from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.optim.staged import Staged, leaves_devices_apart
from lamb_tpu.run import batches, calls
from lamb_tpu.run.combination import Combination
from lamb_tpu.run.statistics import subject
from lamb_tpu.spec import value_of

# Key and value of an error, and the beginning of its problem.
Subject = tuple[str, object, str]
Text = str | Callable[[Combination], str]


class Conflict(NamedTuple):
    """Two components or settings that cannot be combined.

    Attributes:
      part, other: the names of the two components or settings in the README.
      holds: returns whether a run has both.
      subject: the config key that the error names, or a function from the run to a `Subject`.
      problem: the error's problem; a `Subject` may put a beginning before it.
      remedy: see `UserError`.
      always: whether the row applies to an evaluation too.
    """

    part: str
    other: str
    holds: Callable[[Combination], Any]
    subject: str | Callable[[Combination], Subject]
    problem: Text
    remedy: Text
    always: bool = False

    def error(self, run: Combination) -> UserError:
        """Returns the error that rejects a run."""
        if isinstance(self.subject, str):
            key, value, start = f"config.{self.subject}", value_of(run.spec, self.subject), ""
        else:
            key, value, start = self.subject(run)
        problem, remedy = (
            text if isinstance(text, str) else text(run) for text in (self.problem, self.remedy)
        )
        return UserError(key, value, f"{start}{problem}", remedy)


def _statistic(f: Combination) -> Subject:
    return subject(f.spec)


def _halves(f: Combination) -> Subject:
    return subject(f.spec, "halves")


def _per_example(f: Combination) -> Subject:
    return subject(f.spec, "per_example")


def _host_adds(f: Combination) -> str:
    key = calls.added_by_host(f.spec)
    return f"needs each update to be one program, but under {key} the host adds up the microbatches"


_EXCHANGE = "parallel.exchange.name"
_CHANGES = "a changing batch size"
_SENDS = "an exchange other than `float32`"
_CHANGES_SUMS = "an exchange other than `float32` and `bfloat16`"
_SUMS = "an optimizer that itself sums over devices"
_LENGTHS = "training data in batches of similar length, or in streams of text"
_ALWAYS = ("layout", "optimizer")  # stages that apply to an evaluation too

TABLE = {
    "seeds": (
        Conflict(
            "`seeds`",
            "`phases`",
            lambda f: f.spec.phases,
            "seeds",
            lambda f: f"cannot be combined with config.phases ({', '.join(sorted(f.spec.phases))})",
            "use '' and choose one seed with config.seed",
        ),
        Conflict(
            "`seeds`",
            _CHANGES,
            lambda f: calls.added_by_host(f.spec),
            "seeds",
            _host_adds,
            "use '' and choose one seed with config.seed",
        ),
    ),
    "config": (
        Conflict(
            "`parallel.backend='shard_map'`",
            "`mesh.model` or `mesh.sequence` above 1",
            lambda f: f.named and f.axis,
            "parallel.backend",
            lambda f: f"supports only mesh axes that split the batch, not config.mesh.{f.axis}",
            "use 'jit'",
            always=True,
        ),
        Conflict(
            "`optimizer.name='schedule_free_adamw'`",
            "`ema.decay`",
            lambda f: f.optimizer.name == "schedule_free_adamw" and f.spec.ema.decay > 0,
            "ema.decay",
            "cannot be combined with schedule_free_adamw, which averages the weights itself",
            "use 0",
            always=True,
        ),
        Conflict(
            "`schedule.weight_decay_scaling='timescale'`",
            "an optimizer other than `adamw`, or `adamw` without a `weight_decay`",
            lambda f: (
                f.spec.schedule.weight_decay_scaling == "timescale"
                and (f.optimizer.name != "adamw" or "weight_decay" not in f.optimizer.fields)
            ),
            "schedule.weight_decay_scaling",
            "needs AdamW with a weight decay",
            "set config.optimizer.name='adamw' and config.optimizer.weight_decay",
            always=True,
        ),
        Conflict(
            _SENDS,
            "`parallel.backend='jit'`",
            lambda f: f.exchange_name != "float32" and not f.named,
            _EXCHANGE,
            "has no effect under config.parallel.backend='jit', where the compiler sends the gradients",
            "use config.parallel.backend='shard_map'",
        ),
        Conflict(
            _CHANGES_SUMS,
            "one device",
            lambda f: not f.rounds_only and f.exchange.num_devices < 2,
            _EXCHANGE,
            "has nothing to exchange: config.mesh splits the batch over 1 device",
            "use 'float32' or more devices",
        ),
        Conflict(
            _CHANGES_SUMS,
            "`statistics.noise_scale`, `preconditioned` or `halves`, or a batch rule or AGVM that needs one",
            lambda f: not f.rounds_only and f.of_sums,
            _EXCHANGE,
            lambda f: f"changes the sum with which {f.of_sums} compares parts of the batch",
            "use 'float32' or 'bfloat16', or remove the setting that needs the comparison",
        ),
        Conflict(
            _CHANGES,
            "a `batch_size` outside the bounds of `batch_rule`",
            lambda f: not f.bounds[0] <= f.spec.batch_size <= f.bounds[1],
            "batch_size",
            lambda f: f"is outside the bounds of config.batch_rule, {f.bounds[0]} to {f.bounds[1]}",
            "use a batch size within them, or change config.batch_rule.lower or upper",
            always=True,
        ),
        Conflict(
            _CHANGES,
            "a recurrent network that carries its state between updates",
            lambda f: f.rule is not None and f.task.model.carry_shape is not None,
            "batch_rule.name",
            lambda f: (
                f"changes the batch size, but the network {f.spec.model.name!r} carries a state for "
                "each row of the batch"
            ),
            "leave config.batch_rule empty",
        ),
        Conflict(
            _CHANGES,
            "`log.mlperf`",
            lambda f: f.rule is not None and f.spec.log.mlperf,
            "log.mlperf",
            lambda f: f"records one batch size, which {calls.added_by_host(f.spec)} changes",
            "use False",
        ),
        Conflict(
            f"{_CHANGES}, with a rule or AGVM that compares parts of a batch",
            "`parallel.backend='shard_map'` on one device",
            lambda f: f.rule is not None and f.named and f.shards == 1 and f.compared,
            "parallel.backend",
            lambda f: f"compares devices for {f.compared}, but there is only one device",
            "use 'jit', which compares microbatches",
        ),
        Conflict(
            "`loop.updates_per_call` above 1",
            _CHANGES,
            lambda f: f.spec.loop.updates_per_call > 1 and calls.added_by_host(f.spec),
            "loop.updates_per_call",
            _host_adds,
            "use 1",
        ),
        Conflict(
            "`statistics` of gradients",
            "a recurrent network that carries its state between updates",
            lambda f: f.asked and f.task.model.carry_shape is not None,
            _statistic,
            lambda f: f"splits each batch, but {f.spec.model.name!r} carries a state for each row",
            "remove this setting",
        ),
        Conflict(
            "`statistics.noise_scale`, `preconditioned`",
            "a batch of one part: one microbatch, with `jit` or on one device",
            lambda f: (
                (f.asked.noise_scale or f.asked.preconditioned)
                and f.rule is None
                and f.spec.accumulation_steps * f.devices == 1
            ),
            _statistic,
            "compares the parts of a batch, but there is only one part",
            "set config.accumulation_steps to at least 2, or use config.parallel.backend='shard_map' "
            "on several devices",
        ),
        Conflict(
            "`statistics.halves`, `optimizer.agvm`",
            "an odd number of devices under `shard_map`",
            lambda f: f.asked.halves and f.devices > 1 and f.devices % 2,
            _halves,
            lambda f: f"compares even and odd devices, but {f.devices} devices share the batch",
            "use an even number of devices, or config.parallel.backend='jit'",
        ),
        Conflict(
            "`statistics.halves`, `optimizer.agvm`",
            "an odd number of microbatches",
            lambda f: (
                f.asked.halves
                and f.devices == 1
                and f.rule is None
                and f.spec.accumulation_steps % 2
            ),
            _halves,
            lambda f: (
                "compares even and odd microbatches, but config.accumulation_steps is "
                f"{f.spec.accumulation_steps}"
            ),
            lambda f: f"use an even number, such as {f.spec.accumulation_steps + 1}",
        ),
        Conflict(
            "`statistics` that compare parts of a batch",
            "BatchNorm groups over several devices under `shard_map`",
            lambda f: f.devices > 1 and f.group_replicas > 1 and f.switch,
            lambda f: (f"config.statistics.{f.switch}", True, ""),
            lambda f: (
                f"compares devices, but with config.model.group_size={f.spec.model.get('group_size')} "
                f"the gradients of {f.group_replicas} devices depend on each other"
            ),
            lambda f: f"use a group_size of at most {batches.granularity(f.spec) // f.shards}",
        ),
        Conflict(
            "`statistics.per_example`",
            "a task that mixes pairs of examples, as in mixup",
            lambda f: f.asked.per_example and f.mixed,
            _per_example,
            lambda f: f"needs per-example gradients, but config.task.{f.mixed} mixes examples",
            "leave out one of the two",
        ),
        Conflict(
            "`statistics.per_example`",
            "`mesh.model` or `mesh.sequence` above 1",
            lambda f: f.asked.per_example and f.axis,
            _per_example,
            lambda f: (
                f"does not support config.mesh.{f.axis}={f.mesh.shape[f.axis]}, which splits examples"
            ),
            "leave out one of the two",
        ),
    ),
    "data": (
        Conflict(
            "`loop.updates_per_call` above 1",
            "batches cut to the length of their examples",
            lambda f: f.spec.loop.updates_per_call > 1 and f.train_set.buckets is not None,
            "loop.updates_per_call",
            lambda f: (
                f"needs batches of one shape, but those of {data.title(f.train_set)} are cut to the "
                "length of their examples"
            ),
            "use 1",
        ),
        Conflict(
            _CHANGES,
            _LENGTHS,
            lambda f: f.rule is not None and f.order,
            "batch_rule.name",
            lambda f: (
                f"changes the batch size, but {data.title(f.train_set)} is read in {f.order}, which "
                "need a constant batch size"
            ),
            "leave config.batch_rule empty",
        ),
        Conflict(
            "`statistics` of gradients",
            _LENGTHS,
            lambda f: f.asked and f.order,
            _statistic,
            lambda f: (
                f"splits each batch, but {data.title(f.train_set)} is read in {f.order}, which cannot "
                "be split"
            ),
            "remove this setting",
        ),
    ),
    "layout": (
        Conflict(
            "a network with stacked layers",
            "`optimizer.rules` that give these layers no `layer_axes`",
            lambda f: f.stack,
            lambda f: ("config.optimizer.rules", ABSENT, ""),
            lambda f: (
                f"give no layer_axes to {f.stack!r}, which stacks layers along axis 0, so that all "
                "layers would share one trust ratio"
            ),
            "use rules with layer_axes=(0,) for these layers, such as lamb_tpu.models.bert_rules."
            "PARAMETERS_SCANNED (the argument scan of configs/bert_pretrain.py sets them), or "
            "config.model.scan_layers=False",
        ),
        Conflict(
            "a custom optimizer without an argument `axis_name`",
            "parameters or optimizer state that are sharded under `shard_map`",
            lambda f: not f.takes_axis and f.split,
            "optimizer.name",
            lambda f: (
                "has no argument 'axis_name', but inside shard_map it gets shards of tensors such as "
                f"{f.split!r}"
            ),
            "add the argument and sum norms and means over its mesh axes, or use "
            "config.parallel.backend='jit'",
        ),
    ),
    "optimizer": (
        Conflict(
            "an exchange that applies a momentum, such as `dgc`",
            "an optimizer with a momentum",
            lambda f: f.exchange.has_momentum and f.momentum,
            _EXCHANGE,
            lambda f: (
                f"applies a momentum, and config.optimizer.{f.momentum}="
                f"{f.optimizer.arguments[f.momentum]!r} of {f.optimizer.name!r} adds a second one"
            ),
            lambda f: (
                f"set config.optimizer.{f.momentum} or config.parallel.exchange.momentum to 0, or "
                "use config.optimizer.name='sgd'"
            ),
        ),
        Conflict(
            _SUMS,
            "`parallel.backend='jit'` on several devices",
            lambda f: f.sums and not f.named and f.shards > 1,
            "optimizer.name",
            "itself sums over devices, which is not possible with config.parallel.backend='jit'",
            "use config.parallel.backend='shard_map'",
        ),
        Conflict(
            _SUMS,
            "a `local_step_clipper` above 1",
            lambda f: f.sums and leaves_devices_apart(f.tx),
            "optimizer.name",
            "sums over devices only at intervals, between which the parameters would differ from device "
            "to device",
            "set config.optimizer.local_step_clipper=1",
        ),
        Conflict(
            _SUMS,
            "`parallel.optimizer_state='zero1'`",
            lambda f: f.sums and f.spec.parallel.optimizer_state != "replicated",
            "optimizer.name",
            "itself sums over devices and needs its full state on each device",
            "set config.parallel.optimizer_state='replicated'",
        ),
        Conflict(
            _SUMS,
            "`parallel.rules`",
            lambda f: f.sums and f.spec.parallel.rules,
            "optimizer.name",
            "itself sums over devices and needs full parameters on each device",
            "leave config.parallel.rules empty",
        ),
        Conflict(
            _SUMS,
            "`statistics` that compare parts of a batch",
            lambda f: f.sums and (f.asked.noise_scale or f.asked.preconditioned or f.asked.halves),
            "optimizer.name",
            "itself sums over devices, so the step has no gradient of the batch for these statistics",
            "leave out config.statistics and any config.batch_rule that needs statistics",
        ),
        Conflict(
            "`onebit_lamb`, `onebit_adam`, `zero_one_adam`",
            "the exchange `float32` on several devices",
            # Only `Staged` optimizers: a custom optimizer may sum over devices for another reason.
            lambda f: (
                f.sums
                and f.shards > 1
                and isinstance(f.tx, Staged)
                and f.exchange_name == "float32"
            ),
            "optimizer.name",
            "itself sums over devices to send fewer bits than the exchange 'float32' does",
            "set config.parallel.exchange.name='onebit'",
        ),
    ),
    "state": (
        Conflict(
            "`statistics.per_example`",
            "a network with batch statistics, such as BatchNorm",
            lambda f: f.asked.per_example and f.layer,
            _per_example,
            lambda f: (
                f"needs independent examples, but the model's layer {f.layer!r} keeps statistics of "
                "the batch, like BatchNorm"
            ),
            "use a network without such layers, or remove this setting",
        ),
    ),
}


def rejection(run: Combination, stage: str) -> UserError | None:
    """Returns the error of the first applicable row of a stage; None if no row applies."""
    rows = (row for row in TABLE[stage] if run.training or row.always or stage in _ALWAYS)
    return next((row.error(run) for row in rows if row.holds(run)), None)


def check(run: Combination, stage: str) -> None:
    """Raises the error of a stage's first applicable row; stage "config" first checks `requires`."""
    if stage == "config":
        _check_declared(run)
    if error := rejection(run, stage):
        raise error


def _check_declared(run: Combination) -> None:
    """Rejects a config that violates the `requires` of one of its components."""
    spec = run.spec
    for key, name, component in (
        ("model.name", spec.model.name, run.task.model),
        ("task.name", spec.task.name, run.task),
        ("optimizer.name", run.optimizer.name, run.optimizer.build),
        ("batch_rule.name", spec.batch_rule.name, run.rule),
        ("parallel.exchange.name", run.exchange_name, run.exchange),
    ):
        for needed, (value, reason) in getattr(component, "requires", {}).items():
            if (actual := value_of(spec, needed)) != value:
                problem = f"cannot be combined with config.{key}={name!r}, {reason}"
                raise UserError(f"config.{needed}", actual, problem, f"use {value!r}")


def page() -> str:
    """Returns the table of all rows, as Markdown."""
    lines = [f"| {row.part} | {row.other} |" for rows in TABLE.values() for row in rows]
    lines.sort(key=lambda line: line.replace("`", ""))
    return "\n".join(["| | cannot be combined with |", "|---|---|", *lines])


if __name__ == "__main__":
    print(page())
