"""What a recipe may say: the keys of a config, its argument and its checks."""

import json
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from lamb_tpu.errors import UserError

# Keys that may differ when a workdir is used again: where files lie and what is told, never what is
# computed.
FREE_KEYS = (
    "data.dir", "data.prepared_dir", "data.options.vocab", "data.options.threads",
    "eval.batch_size", "checkpoint.", "log.",
    "guards.", "mesh.", "parallel.backend", "parallel.rules", "parallel.optimizer_state",
    "init_from", "target.stop",
)
# What an evaluation of its own may change besides.
EVAL_FREE_KEYS = (*FREE_KEYS, "data.eval_split")


def base_config() -> ConfigDict:
    """Every key that every config has, with its default; a recipe changes values.

    A duration is one string: '30 epochs', '1000 steps', '50000 examples' or '5 percent' (of the
    run). Model, task, optimizer and rules have their own fields beside `name`; assign a new
    `ConfigDict` to replace one. A name such as 'my_package.my_module:Name' is one of your own. The
    result is locked: a misspelt key raises where it is written.
    """
    config = ConfigDict()
    config.seed = 0
    config.batch_size = 128  # global, in examples an update
    config.accumulation_steps = 1  # microbatches into which a device's part of the batch is cut
    config.duration = "1 epochs"
    config.data = ConfigDict()
    config.data.name = "digits"
    config.data.train_split = "train"
    config.data.eval_split = "test"
    config.data.dir = placeholder(str)  # folder with the original files; None: download
    config.data.prepared_dir = placeholder(str)  # where TFDS keeps prepared sets; None: its default
    config.data.options = ConfigDict()  # the set's own, such as sequence_length of text
    config.task = ConfigDict({"name": "classification"})
    config.model = ConfigDict({"name": "mlp"})
    config.optimizer = ConfigDict({"name": "lamb", "learning_rate": 0.001})
    # Where the first weights come from: the workdir of a run (of its newest checkpoint), a folder
    # with config.json and model.safetensors of Hugging Face's or timm's, or a .safetensors file of
    # timm's or torchvision's; None: random ones.
    config.init_from = placeholder(str)
    config.init = ConfigDict()
    config.init.optimizer_state = "reset"  # reset | keep: moments and counts are the other run's
    # Regex over paths of those that may be missing there, or of another shape; '': none.
    config.init.new_parameters = ""
    config.prng = "threefry2x32"  # threefry2x32 | rbg: what draws dropout's masks
    # Runs one after the other, each from the weights of the one before: name -> the keys that it
    # sets otherwise, in the order of the names. See lamb_tpu.run.phases.
    config.phases = ConfigDict()
    config.schedule = ConfigDict()
    config.schedule.scaling = "identity"  # identity | linear | sqrt | random_matrix | legw
    config.schedule.base_batch_size = 128  # the batch optimizer.learning_rate is meant for
    config.schedule.weight_decay_scaling = "identity"  # timescale: AdamW's is kept at every batch
    config.schedule.warmup = "0 steps"  # legw: the warm-up at the base batch
    config.schedule.warmup_power = 1.0
    config.schedule.start_factor = 0.0  # learning rate where the warm-up starts / peak
    config.schedule.hold = "0 steps"  # at the peak
    config.schedule.decay = "constant"  # constant | polynomial | cosine | exponential | step
    config.schedule.decay_from = "warmup"  # 'warmup': its end, and the hold's; 'zero': update 0
    config.schedule.power = 1.0  # of the polynomial
    # Of polynomial and cosine: last learning rate / peak; of the exponential: where it falls to.
    config.schedule.end_factor = 0.0
    config.schedule.decay_factor = 1.0  # of exponential and step: what a drop leaves
    config.schedule.decay_every = "0 steps"  # of the exponential: from drop to drop
    config.schedule.staircase = True  # of the exponential: whole drops, nothing between them
    config.schedule.boundaries = ""  # of step: '30 epochs, 60 epochs, 80 epochs', from update 0
    config.schedule.min_factor = 0.0  # floor under the learning rate / peak
    config.schedule.first_step = 0  # the first update's place: 1 loses none to a rate of 0
    config.eval = ConfigDict({"every": "1 epochs", "batch_size": 1024})
    # What the run is to reach. Wall time and update of the first evaluation that does are recorded.
    config.target = ConfigDict()
    config.target.metric = ""  # of the evaluation, such as 'accuracy' or 'ema_accuracy'; '': none
    config.target.value = 0.0
    config.target.mode = "max"  # max | min: at least the value, or at most
    config.target.stop = True  # the run ends there; False: it goes on
    config.checkpoint = ConfigDict()
    config.checkpoint.every = "1 epochs"
    config.checkpoint.keep = 3  # of the newest
    config.checkpoint.keep_every = "0 steps"  # saved at these updates too, for good; 0: none
    # Name of an evaluation's metric, such as 'accuracy' or 'ema_accuracy': the state is saved after
    # each evaluation too, and that of the best one so far is kept besides. '': none.
    config.checkpoint.best = ""
    config.checkpoint.best_mode = "max"  # max | min: which value of it is the best
    config.log = ConfigDict({"every": "10 steps", "tensorboard": True})
    config.log.heartbeat_seconds = 60.0  # from line to line of each process but the first; 0: none
    config.log.mlperf = False  # mlperf.log in the workdir, of the way to config.target
    config.ema = ConfigDict({"decay": 0.0})  # of an average of the weights, evaluated too; 0: none
    config.guards = ConfigDict()
    config.guards.max_skipped = 0  # of a run's updates, left out where the gradient is not finite
    config.guards.spike_factor = 10.0  # a loss this many times the recent median is told; 0: none
    config.guards.spike_floor = 1.0  # no loss up to this is told, whatever the recent median
    config.guards.desync_every = "0 steps"  # compares the processes' parameters; 0: never
    config.guards.hang_seconds = 1800.0  # without progress the process ends; 0: never
    # The batch is split over data and fsdp. Where fsdp is not 1, ZeRO-1 and the rule 'fsdp' split
    # over it alone, so that on a large mesh what they gather stays among neighbours.
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "model": 1, "sequence": 1})
    config.parallel = ConfigDict()
    config.parallel.backend = "jit"  # jit | shard_map: who places the collectives, compiler or we
    config.parallel.rules = ()  # (regex over paths, replicated | fsdp | mesh axis of each axis)
    config.parallel.optimizer_state = "replicated"  # replicated | zero1: split over fsdp, or data
    config.parallel.gradient_dtype = "float32"  # float32 | bfloat16: what gradients are sent in
    return config.lock()


def recipe_folder() -> pathlib.Path:
    """The folder of the recipes that come along: in an installed package its own, else configs."""
    package = pathlib.Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe_path(name: str) -> str:
    """The file that `name` is, or of a name without a folder that of a recipe that comes along."""
    shipped = recipe_folder() / f"{name.removesuffix('.py')}.py"
    if os.path.exists(name) or not re.fullmatch(r"\w+(\.py)?", name) or not shipped.exists():
        return name
    return str(shipped)


def parse_argument(argument: str | None, **defaults: Any) -> ConfigDict:
    """Reads the text after the colon of `configs/x.py:batch=4096,smoke`.

    Args:
      argument: comma-separated `key=value` items; a bare `key` means true.
      **defaults: the known keys with their defaults, whose types the values take.

    Returns:
      The values, with defaults where the argument is silent.

    Raises:
      UserError: an unknown key or a value of another type.
    """
    values = dict(defaults)
    for item in (argument or "").split(","):
        if not item.strip():
            continue
        key, has_value, text = (part.strip() for part in item.partition("="))
        if key not in defaults:
            raise UserError(
                f"the config's argument {item!r} has the unknown key {key!r}; "
                f"known: {', '.join(defaults)}"
            )
        values[key] = _convert(key, text if has_value else "true", defaults[key])
    return ConfigDict(values)


def check_argument(key: str, value: Any, known: Collection[Any]) -> None:
    """Raises a UserError where a config's argument is none of the known values."""
    if value not in known:
        raise UserError(
            f"the config's argument {key}={value!r} is unknown; known: {', '.join(map(str, known))}"
        )


def _convert(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    if kind is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    try:
        if kind is bool:
            raise ValueError
        return kind(text)
    except ValueError:
        raise UserError(
            f"the config's argument {key}={text!r} must be of type {kind.__name__}, "
            f"such as {default!r}"
        ) from None


def check_keys(config: ConfigDict) -> None:
    """Refuses keys that `base_config` does not have, missing ones, and values of another type.

    Model, task, optimizer and data set check their own fields when they are built.
    """
    _compare_keys(config, base_config(), "config")
    for section in ("task", "model", "optimizer"):
        if "name" not in config[section]:
            raise UserError(f"config.{section} has no name; give config.{section}.name")
    if "learning_rate" not in config.optimizer:
        raise UserError("config.optimizer.learning_rate is missing; give the base batch's rate")
    flatten(config)


_CHOICES = {
    "parallel.backend": ("jit", "shard_map"),
    "parallel.optimizer_state": ("replicated", "zero1"),
    "parallel.gradient_dtype": ("float32", "bfloat16"),
    "checkpoint.best_mode": ("max", "min"),
    "target.mode": ("max", "min"),
    "init.optimizer_state": ("reset", "keep"),
    "prng": ("threefry2x32", "rbg"),
}
# Sections whose fields are not those of the base.
_OWN_FIELDS = (
    "config.task", "config.model", "config.optimizer", "config.mesh", "config.data.options",
    "config.phases",
)
_KINDS = {
    int: "a whole number", float: "a number", str: "text", bool: "True or False", tuple: "a tuple",
}


def _compare_keys(config: Mapping[str, Any], base: Mapping[str, Any], path: str) -> None:
    for key in config:
        if key not in base:
            raise UserError(f"{path}.{key} is unknown; {path} has: {', '.join(base)}")
    for key in base:
        if key not in config:
            raise UserError(f"{path}.{key} is missing; start from lamb_tpu.config.base_config()")
        value, default = config[key], base[key]
        if isinstance(default, ConfigDict):
            if not isinstance(value, ConfigDict):
                raise UserError(f"{path}.{key} is {value!r}; it must be a ConfigDict")
            if f"{path}.{key}" not in _OWN_FIELDS:
                _compare_keys(value, default, f"{path}.{key}")
        elif default is not None or value is not None:
            kind = str if default is None else type(default)
            if type(value) not in ((int, float) if kind is float else (kind,)):
                raise UserError(f"{path}.{key} is {value!r}; it must be {_KINDS[kind]}")


def check_values(config: ConfigDict) -> None:
    """Refuses numbers out of range, in a config that `check_keys` has passed."""
    flat = flatten(config)
    for key in (
        "batch_size", "eval.batch_size", "checkpoint.keep", "schedule.base_batch_size",
        "accumulation_steps",
    ):
        if flat[key] < 1:
            raise UserError(f"config.{key} is {flat[key]}; it must be at least 1")
    for key in (
        "guards.max_skipped", "guards.spike_factor", "guards.spike_floor", "guards.hang_seconds",
        "log.heartbeat_seconds",
    ):
        if not 0 <= flat[key] < math.inf:
            raise UserError(f"config.{key} is {flat[key]}; it must be a number of at least 0")
    if flat["schedule.first_step"] >= 2**31:  # updates are counted by 32 bits
        raise UserError(
            f"config.schedule.first_step is {flat['schedule.first_step']}; it must be below {2**31}"
        )
    for key in ("init_from", "data.dir", "data.prepared_dir"):
        if flat[key] == "":  # which would be the current folder
            raise UserError(f"config.{key} is empty; give a path, or leave it out for none")
    for key, known in _CHOICES.items():
        if flat[key] not in known:
            raise UserError(f"config.{key} is {flat[key]!r}; known: {', '.join(known)}")
    if not math.isfinite(config.target.value):
        raise UserError(f"config.target.value is {config.target.value}; it must be finite")
    if not config.target.metric:
        for key, off in (("target.value", 0.0), ("log.mlperf", False)):
            if flat[key] != off:
                raise UserError(
                    f"config.{key} is {flat[key]}, and config.target.metric is ''; give the metric "
                    "of the evaluation that is to reach config.target.value, such as 'accuracy', "
                    f"or config.{key}={off}"
                )
    if not 0 <= config.ema.decay < 1:
        raise UserError(f"config.ema.decay is {config.ema.decay}; it must be in [0, 1)")
    if config.parallel.gradient_dtype != "float32" and config.parallel.backend != "shard_map":
        raise UserError(
            f"config.parallel.gradient_dtype is {config.parallel.gradient_dtype!r}; under "
            "config.parallel.backend='jit' the compiler sends what it likes, so this needs "
            "'shard_map'"
        )
    if not 0 <= config.seed < 2**32:  # JAX' random keys keep 32 bits of it
        raise UserError(f"config.seed is {config.seed}; it must lie in 0..{2**32 - 1}")
    try:
        re.compile(config.init.new_parameters)
    except re.error as error:
        raise UserError(
            f"config.init.new_parameters is {config.init.new_parameters!r}, which is no regex "
            f"({error})"
        ) from None
    for key in ("start_factor", "end_factor", "min_factor"):
        factor = config.schedule[key]
        if not 0 <= factor <= 1:
            raise UserError(f"config.schedule.{key} is {factor}; it must lie in 0..1")
    rate = config.optimizer.learning_rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise UserError(
            f"config.optimizer.learning_rate is {rate!r}; it must be a number of at least 0"
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'optimizer.name': 'lamb', ...}, in sorted order, with tuples as lists as JSON has them.

    Raises:
      UserError: a value that JSON cannot hold.
    """
    flat: dict[str, Any] = {}
    for key in sorted(config):
        value = config[key]
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            try:
                flat[prefix + key] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                raise UserError(
                    f"config.{prefix}{key} is {value!r}; a config holds numbers, text, booleans, "
                    "None and lists of them only (a dtype by its name, such as 'bfloat16')"
                ) from None
    return flat


def unflatten(flat: Mapping[str, Any]) -> ConfigDict:
    """The config of which `flatten` made `flat`, locked; what is not in it is as in the base."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, key = path.split(".")
        section = nested
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    config = base_config()
    with config.unlocked():
        _overlay(config, nested, "config")
    return config


def _overlay(config: ConfigDict, nested: Mapping[str, Any], path: str) -> None:
    for key, value in nested.items():
        old = config.get(key)
        if isinstance(old, ConfigDict) and not isinstance(value, dict):
            raise UserError(f"{path}.{key} is {value!r}; it must be a ConfigDict")
        if isinstance(old, ConfigDict) and f"{path}.{key}" not in _OWN_FIELDS:
            _overlay(old, value, f"{path}.{key}")
        elif isinstance(value, dict):
            config[key] = ConfigDict(value)
        else:  # JSON has no tuples
            try:
                config[key] = tuple(value) if isinstance(old, tuple) else value
            except TypeError:
                raise UserError(
                    f"{path}.{key} is {value!r}, which is of another type than {old!r}"
                ) from None


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], free_keys: tuple[str, ...] = FREE_KEYS
) -> list[str]:
    """One line for each key whose value differs between two flattened configs, free keys aside."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        free = re.sub(r"^phases\.[^.]+\.", "", key).startswith(free_keys)
        if old.get(key) != new.get(key) and not free:
            lines.append(f"{key}: {old.get(key)!r} there, {new.get(key)!r} now")
    return lines
