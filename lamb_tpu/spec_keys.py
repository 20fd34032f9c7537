"""The config schema: type, default, bounds and meaning of every key, as frozen dataclasses.

configs/keys.md lists the keys; `lamb_tpu.keys` generates that page.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lamb_tpu import limits


class Details(NamedTuple):
    """Description of a key for configs/keys.md, and the bounds of its value.

    `known` has the valid words; if it is (), any word is valid. If `is_path` is true, the value may
    be None, but not an empty text.
    """

    text: str
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    known: tuple[str, ...] = ()
    is_path: bool = False


def _key(default: Any, text: str, **bounds: Any) -> Any:
    """Returns the dataclass field of a key; `bounds` are further fields of `Details`."""
    return dataclasses.field(default=default, metadata={"details": Details(text, **bounds)})


def _section(kind: type) -> Any:
    return dataclasses.field(default_factory=kind)


@dataclasses.dataclass(frozen=True)
class Component:
    """A section whose fields depend on the component that it names, such as the model.

    `name` is '' if there is no component. If `has_name` is false, the section has no key `name`.
    """

    name: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    has_name: bool = True

    def get(self, field: str, default: Any = None) -> Any:
        """Returns the value of a field, or `default` if the config leaves it out."""
        return self.fields.get(field, default)

    def as_dict(self) -> dict[str, Any]:
        """Returns the name and the fields, as a nested config holds them."""
        fields = {name: plain(value) for name, value in self.fields.items()}
        return {"name": self.name, **fields} if self.has_name else fields


def plain(value: Any) -> Any:
    """Replaces frozen mappings with plain dictionaries, at any depth."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return value


def _component(name: str, text: str, **fields: Any) -> Any:
    return _key(Component(name, MappingProxyType(fields), bool(name)), text)


def _open(text: str, **fields: Any) -> Any:
    """Returns the dataclass field of a section with arbitrary keys."""
    default = MappingProxyType(fields)
    return dataclasses.field(default_factory=lambda: default, metadata={"details": Details(text)})


@dataclasses.dataclass(frozen=True)
class Data:
    """Settings of the data set."""

    name: str = _key("digits", "Name of the data set, or 'package.module:Name' of a custom one.")
    train_split: str = _key("train", "Split to train on, such as 'train[:90%]'.")
    eval_split: str = _key("test", "Split to evaluate on.")
    dir: str | None = _key(None, "Folder of the original files; None: download.", is_path=True)
    prepared_dir: str | None = _key(
        None, "Folder in which TFDS stores prepared data sets; None: TFDS's default.", is_path=True
    )
    options: Mapping[str, Any] = _open("Options of the data set, such as sequence_length for text.")


@dataclasses.dataclass(frozen=True)
class Init:
    """Settings for starting from the weights in `init_from`."""

    optimizer_state: str = _key(
        "reset",
        "Whether to reset the optimizer's moments and counts, or to keep those of init_from.",
        known=("reset", "keep"),
    )
    new_parameters: str = _key(
        "",
        "Regex over the paths of parameters. If init_from lacks a matching parameter or has it "
        "in another shape, the parameter starts from random values. '': all must be in init_from.",
    )
    unfinished: bool = _key(
        False, "Accept an unfinished run in init_from, and read its newest checkpoint."
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate schedule, and its scaling with the batch size."""

    scaling: str = _key(
        "identity",
        "Rule that scales the learning rate with the batch size: identity | linear | sqrt | "
        "random_matrix | legw.",
    )
    base_batch_size: int = _key(
        128, "Batch size for which optimizer.learning_rate is given.", least=1
    )
    weight_decay_scaling: str = _key(
        "identity", "Rule that scales the weight decay with the batch size: identity | timescale."
    )
    warmup: str = _key(
        "0 steps", "Length of the warm-up; with scaling=legw, its length at base_batch_size."
    )
    warmup_power: float = _key(1.0, "Exponent of the warm-up; 1: linear.")
    start_factor: float = _key(
        0.0, "Initial learning rate of the warm-up, as a fraction of the peak.", least=0, most=1
    )
    hold: str = _key("0 steps", "Time at the peak learning rate, between warm-up and decay.")
    decay: str = _key(
        "constant",
        "Decay after the warm-up: constant | polynomial | cosine | exponential | step | "
        "package.module:Name.",
    )
    options: Mapping[str, Any] = _open("Arguments of a custom decay.")
    decay_from: str = _key(
        "warmup", "Start of the decay: the end of warm-up and hold (warmup), or update 0 (zero)."
    )
    power: float = _key(1.0, "Exponent of the polynomial decay.")
    end_factor: float = _key(
        0.0,
        "Polynomial and cosine: final learning rate; exponential: lower bound; each as a "
        "fraction of the peak.",
        least=0,
        most=1,
    )
    decay_factor: float = _key(
        1.0, "Exponential and step: factor by which each drop multiplies the learning rate."
    )
    decay_every: str = _key("0 steps", "Exponential: time between drops.")
    staircase: bool = _key(True, "Exponential: True: constant between drops; False: continuous.")
    boundaries: str = _key(
        "", "Step: times of the drops, counted from update 0, such as '30 epochs, 60 epochs'."
    )
    min_factor: float = _key(
        0.0, "Lower bound of the learning rate, as a fraction of the peak.", least=0, most=1
    )
    first_step: int = _key(
        0, "Step of the schedule at the first update; 1 skips a learning rate of 0.", below=2**31
    )


@dataclasses.dataclass(frozen=True)
class Eval:
    """Settings of evaluations."""

    every: str = _key("1 epochs", "Time between evaluations.")
    batch_size: int = _key(
        1024, "Examples in an evaluation batch; the metrics do not depend on it.", least=1
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """A target value; the run records when an evaluation first reaches it."""

    metric: str = _key(
        "", "Evaluation metric of the target, such as 'ema_accuracy'; '': no target."
    )
    value: float = _key(0.0, "The value to reach.")
    mode: str = _key(
        "max",
        "Whether the metric must be at least (max) or at most (min) the value.",
        known=("max", "min"),
    )
    stop: bool = _key(True, "End the run when it reaches the target; False: continue.")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Settings of checkpoints."""

    every: str = _key("1 epochs", "Time between checkpoints.")
    keep: int = _key(3, "Number of newest checkpoints to keep.", least=1)
    keep_every: str = _key("0 steps", "Time between checkpoints that are never deleted; 0: none.")
    best: str = _key(
        "",
        "Evaluation metric, such as 'accuracy', that selects the best checkpoint. The state "
        "is then also saved after each evaluation, and the checkpoint with the best value is "
        "kept. '': none.",
    )
    best_mode: str = _key(
        "max", "Whether larger (max) or smaller (min) values are better.", known=("max", "min")
    )


@dataclasses.dataclass(frozen=True)
class Log:
    """Settings of records and logs."""

    every: str = _key("10 steps", "Time between records.")
    tensorboard: bool = _key(True, "Also write the records for TensorBoard.")
    heartbeat_seconds: float = _key(
        60.0, "Seconds between progress lines of each process except the first; 0: none.", least=0
    )
    lipschitz_rows: int = _key(
        0, "Examples for the local Lipschitz estimate in each record; 0: no estimate.", least=0
    )
    mlperf: bool = _key(
        False, "Write mlperf.log, with the time to reach config.target, into the workdir."
    )


@dataclasses.dataclass(frozen=True)
class Loop:
    """Settings of the training loop."""

    updates_per_call: int = _key(
        1,
        "Largest number of updates in one call of the compiled step. A call ends at each "
        "record, evaluation and save; a signal takes effect when the call ends.",
        least=1,
    )
    held_share: float = _key(
        0.02,
        "Largest fraction of a device's memory that a data set may fill permanently, so that it "
        "is read and sent only once. Applies to the evaluation set and, on accelerators, to a "
        "training set that consists of arrays. 0: no data set stays on the devices.",
        least=0,
        most=1,
    )


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Gradient statistics in the records; see lamb_tpu.batching."""

    noise_scale: bool = _key(
        False, "Record the noise scale, estimated from the gradients of subsets of each batch."
    )
    preconditioned: bool = _key(False, "Record the noise scale in the geometry of Adam or LAMB.")
    decay: float = _key(0.99, "Decay per update of the noise scale's moving averages.")
    halves: bool = _key(
        False, "Record the cosine between the gradients of two halves of each batch."
    )
    modules: tuple[Any, ...] = _key(
        (),
        "Modules for which the cosine is also recorded, as pairs (name, regex over the paths of "
        "parameters); a parameter belongs to the first module that matches.",
    )
    per_example: int = _key(
        0, "Number of examples whose gradients are computed one by one; 0: none."
    )
    interval: int = _key(100, "Updates between two measurements of per-example gradients.")


@dataclasses.dataclass(frozen=True)
class Ema:
    """A moving average of the weights, which is also evaluated."""

    decay: float = _key(0.0, "Decay of the average per update; 0: no average.", least=0, below=1)


@dataclasses.dataclass(frozen=True)
class Guards:
    """Conditions that end a run or are reported."""

    max_skipped: int = _key(
        0, "Largest number of updates with a non-finite gradient that a run may skip.", least=0
    )
    allow_nonfinite_eval: bool = _key(
        False, "Only warn if an evaluation metric is not finite; False: end the run as diverged."
    )
    spike_factor: float = _key(
        10.0, "Report a loss above this multiple of the median of recent losses; 0: never.", least=0
    )
    spike_floor: float = _key(1.0, "Report no loss below this value, whatever the median.", least=0)
    desync_every: str = _key(
        "0 steps", "Time between comparisons of the devices' copies of the parameters; 0: none."
    )
    hang_seconds: float = _key(
        1800.0, "End a process that makes no progress for this many seconds; 0: never.", least=0
    )


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Settings of collectives, shardings and the gradient exchange."""

    backend: str = _key(
        "jit",
        "Whether the compiler inserts the collectives (jit) or the program names them (shard_map).",
        known=("jit", "shard_map"),
    )
    rules: tuple[Any, ...] = _key(
        (),
        "Sharding of the parameters: pairs (regex over paths, replicated | fsdp | mesh axis "
        "of each array axis).",
    )
    optimizer_state: str = _key(
        "replicated",
        "Sharding of the optimizer's state: replicated, or split over fsdp, or over data if "
        "fsdp is 1 (zero1).",
        known=("replicated", "zero1"),
    )
    exchange: Component = _component(
        "float32",
        "Format in which gradients are sent, with the options of that exchange; see "
        "lamb_tpu.parallel. The field full_precision has regexes over the paths of parameters "
        "whose gradients are sent in float32.",
    )


@dataclasses.dataclass(frozen=True)
class Spec:
    """A validated, frozen config. A duration is text: '30 epochs', '1000 steps', '5 percent'."""

    seed: int = _key(
        0,
        "Seed of the initial weights, the order of the data, and dropout.",
        least=0,
        most=limits.MAX_SEED,
    )
    seeds: str = _key(
        "",
        "Seeds of several runs that train side by side in one program, each in "
        "WORKDIR/seed_N: '0:5' for 0 to 4, or '0, 3, 7'. They replace config.seed; '': one "
        "run.",
    )
    batch_size: int = _key(128, "Examples per update, over all devices.", least=1)
    accumulation_steps: int = _key(
        1, "Number of microbatches into which a device's share of the batch is split.", least=1
    )
    duration: str = _key("1 epochs", "Duration of the run.")
    batch_rule: Component = _component(
        "",
        "Rule that changes the batch size during the run, with its fields; see "
        "lamb_tpu.batching. Without a name, every batch has batch_size examples. With a name, "
        "the schedule and durations are given for batch_size, and every batch is an integer "
        "number of microbatches of batch_size / accumulation_steps examples. The field "
        "scaling says how the learning rate follows the batch size: identity | linear | sqrt.",
    )
    data: Data = _section(Data)
    task: Component = _component("classification", "The learning problem.")
    model: Component = _component("mlp", "The network.")
    optimizer: Component = _component("lamb", "The optimizer.", learning_rate=0.001)
    init_from: str | None = _key(
        None,
        "Source of the initial weights: the workdir of a run, whose newest checkpoint is "
        "read; a folder with config.json and model.safetensors from Hugging Face or timm; or "
        "a .safetensors file from timm or torchvision. None: random weights.",
        is_path=True,
    )
    init: Init = _section(Init)
    prng: str = _key(
        "threefry2x32",
        "Random number generator of the dropout masks.",
        known=("threefry2x32", "rbg"),
    )
    phases: Mapping[str, Any] = _open(
        "Consecutive runs, each starting from the weights of the previous one: name -> the "
        "keys that the phase changes. Phases run in the order of their names; see "
        "lamb_tpu.run.phases."
    )
    schedule: Schedule = _section(Schedule)
    eval: Eval = _section(Eval)
    target: Target = _section(Target)
    checkpoint: Checkpoint = _section(Checkpoint)
    log: Log = _section(Log)
    loop: Loop = _section(Loop)
    statistics: Statistics = _section(Statistics)
    ema: Ema = _section(Ema)
    guards: Guards = _section(Guards)
    mesh: Mapping[str, int] = _open(
        "Number of devices along each axis; -1: all remaining devices. The batch is split over "
        "data and fsdp. If fsdp is not 1, ZeRO-1 and the rule 'fsdp' split over fsdp only, so "
        "that they gather among neighbouring devices of a large mesh.",
        data=-1,
        fsdp=1,
        model=1,
        sequence=1,
    )
    parallel: Parallel = _section(Parallel)


class Key(NamedTuple):
    """A key of a config: its dotted path, the value's type and default, and its details."""

    path: str
    kind: Any
    default: Any
    details: Details


def keys(section: type = Spec, prefix: str = "") -> Iterator[Key]:
    """Yields every key, in the order in which the classes declare them."""
    for field in dataclasses.fields(section):
        path, kind = f"{prefix}{field.name}", field.type
        if "details" not in field.metadata:
            assert isinstance(kind, type)  # a section
            yield from keys(kind, f"{path}.")
            continue
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        yield Key(path, kind, default, field.metadata["details"])
